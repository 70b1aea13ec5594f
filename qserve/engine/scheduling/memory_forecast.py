"""MemoryForecast: predicts whether the KV pages last until the running requests end.

A request takes more pages as it generates, and returns all of them at its end. Let
r_1 <= r_2 <= ... be the numbers of tokens that the requests are expected to add. The number of
pages in use peaks shortly before one of the requests ends. Before the k-th end it has grown by

    sum over j >= k of the pages for r_k more tokens  -  sum over j < k of the pages held now

A waiting request is admitted if the maximum over k, including this request, is at most the number
of free pages. Otherwise requests would be preempted later, and their tokens computed twice.
Method: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025).
"""

from bisect import bisect_right, insort
from collections import deque
from typing import NamedTuple

import numpy as np

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Request

NUM_LENGTHS = 1024  # number of outputs whose lengths are kept
MIN_LENGTHS = 16  # with fewer longer outputs than this, the expected length is a guess
# Expected output tokens before any output has ended, limited to this fraction of all pages.
FIRST_GUESS, MAX_GUESS_SHARE = 512, 1 / 32
# Fraction of the pages to leave free. It grows by MARGIN_STEP with each preemption and shrinks by
# MARGIN_STEP after MARGIN_ENDS requests have ended without a preemption.
MARGIN_STEP, MAX_MARGIN = 0.01, 0.1
MARGIN_ENDS = 256
# Number of steps after which a refused request is tried again, if no request has ended meanwhile.
STEPS_BETWEEN = 16


class OutputLengths:
    """Lengths of recent outputs, and the expected length of an output that continues."""

    def __init__(self, first_guess: int) -> None:
        self._first_guess = first_guess
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: np.ndarray | None = None  # sums of the sorted lengths from each index on
        self._num_added = 0

    def add(self, length: int) -> None:
        if len(self._newest) == NUM_LENGTHS:
            del self._sorted[bisect_right(self._sorted, self._newest.popleft()) - 1]
        self._newest.append(length)
        insort(self._sorted, length)
        self._sums = None
        self._num_added += 1

    def expected(self, generated: np.ndarray) -> np.ndarray:
        """Return the expected lengths of outputs that have `generated` tokens so far.

        The expected length is the mean of the longer outputs seen. With fewer than MIN_LENGTHS of
        these it is a guess: twice the generated tokens, at least `first_guess`. Short outputs end
        first, so guesses count in the mean until as many outputs have ended as are running.
        """
        guess = np.maximum(2 * generated, self._first_guess).astype(np.float64)
        num_guesses = max(0, len(generated) - self._num_added)
        if self._sums is None:
            lengths = np.array([*self._sorted, 0], np.float64)
            self._sums = np.cumsum(lengths[::-1])[::-1]
        index = np.searchsorted(self._sorted, generated, side="right")
        num_longer = len(self._sorted) - index
        mean = (self._sums[index] + num_guesses * guess) / np.maximum(num_longer + num_guesses, 1)
        return np.where(num_longer >= MIN_LENGTHS, mean, guess)


class _Row(NamedTuple):
    """One request in a forecast."""

    num_generated: int
    max_generated: int
    is_known: bool  # True: the output has exactly `max_generated` tokens
    num_tokens: int
    num_pages: int
    num_own: int  # number of pages that it frees at its end
    num_to_limit: int  # number of pages to add until `max_generated`


class _StepView:
    """The running requests at the first forecast of a step, plus those admitted in the step since.

    Pages that planned chunks take do not change a forecast: they move from free to a request.
    """

    def __init__(self, pool: BlockPool, running: list[Request]) -> None:
        self._pool = pool
        self.num_free = pool.num_free
        self._num_requests, self._last = len(running), running[-1]
        self._admitted: Request | None = None  # allowed, but not yet seen in `running`
        size = pool.page_size
        self._rows = []
        for each in running:
            num_pages = len(each.block_table)
            # pages that other requests share are not freed when this request ends
            num_own = max(0, num_pages - each.facts.num_cached // size)
            self._rows.append(self._row(each, num_pages, num_own))
        self.num_to_limits = sum([row.num_to_limit for row in self._rows])
        self._columns: np.ndarray | None = None  # [columns, requests]; cache of the first rows

    def describes(self, running: list[Request]) -> bool:
        """Return True if the view still describes `running`.

        False, for example, if an allowed request is not the last of the running ones.
        """
        if self._admitted is not None:
            if running[-1] is not self._admitted:
                return False
            self._num_requests, self._last = self._num_requests + 1, self._admitted
            self._admitted = None
        return len(running) == self._num_requests and running[-1] is self._last

    def row(self, request: Request, num_needed: int) -> _Row:
        """Return the row of a waiting request that takes `num_needed` free pages."""
        num_pages = self._pool.pages_for(request.num_slots(request.num_tokens))
        return self._row(request, num_pages, num_needed)

    def _row(self, request: Request, num_pages: int, num_own: int) -> _Row:
        # The last token is never an input, so it needs no slot in a page.
        longest = request.num_slots(request.num_prompt_tokens + request.max_tokens - 1)
        return _Row(
            num_generated=request.num_tokens - request.num_prompt_tokens,
            max_generated=request.max_tokens,
            is_known=_has_known_length(request),
            num_tokens=request.num_tokens,
            num_pages=num_pages,
            num_own=num_own,
            num_to_limit=max(0, self._pool.pages_for(longest) - num_pages),
        )

    def add(self, request: Request, row: _Row) -> None:
        """Add an allowed request, which is expected to become the last running request."""
        self._admitted = request
        self._rows.append(row)
        self.num_free -= row.num_own
        self.num_to_limits += row.num_to_limit

    def columns_with(self, row: _Row) -> np.ndarray:
        """Return the columns of all requests plus one more: [columns, requests + 1]."""
        known = 0 if self._columns is None else self._columns.shape[1]
        new = np.array([*self._rows[known:], row], np.float64).T
        found = new if self._columns is None else np.concatenate((self._columns, new), 1)
        self._columns = found[:, :-1]
        return found


class MemoryForecast:
    """Decides for one scheduler whether a request that fits now will also fit later."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        most = int(pool.num_pages * pool.page_size * MAX_GUESS_SHARE)
        self._lengths = OutputLengths(min(FIRST_GUESS, max(1, most)))
        self._margin = 0.0  # fraction of the pages to leave free
        self._num_ends = 0  # number of requests that ended since the margin changed
        self._refused: Request | None = None  # the request that was refused last
        self._num_steps_refused = 0
        self._view: _StepView | None = None  # view of this step

    def begin_step(self) -> None:
        self._view = None
        self._num_steps_refused += 1
        if self._num_steps_refused >= STEPS_BETWEEN:
            self._refused = None

    def note_end(self, request: Request) -> None:
        """Record that a running request ended, for any reason."""
        self._refused = None
        self._num_ends += 1
        if self._num_ends >= MARGIN_ENDS:
            self._margin = max(0.0, self._margin - MARGIN_STEP)
            self._num_ends = 0
        if _has_known_length(request):
            return  # its length says nothing about other outputs
        for row in request.rows:
            num_tokens = len(row.token_ids) - row.num_prompt_tokens
            if num_tokens > 0:
                self._lengths.add(num_tokens)

    def note_preemption(self) -> None:
        """Record that a request was preempted because no page was free."""
        self._refused = None
        self._num_ends = 0
        self._margin = min(MAX_MARGIN, self._margin + MARGIN_STEP)

    def allows(self, request: Request, running: list[Request], num_needed: int) -> bool:
        """Return True if the running requests and `request` are expected to fit until they end.

        `num_needed`: number of free pages that `request` takes when it starts. A single request
        always fits. Requests also fit if the pages suffice even when all reach their token limits.
        """
        if not running or request.beams is not None:
            return True
        if request is self._refused:
            return False
        view = self._view
        if view is None or not view.describes(running):
            view = self._view = _StepView(self._pool, running)
        row = view.row(request, num_needed)
        num_free = view.num_free - num_needed
        allowed = view.num_to_limits + row.num_to_limit <= num_free
        if not allowed:
            num_free -= self._margin * self._pool.num_pages
            allowed = self._most_growth(view.columns_with(row)) <= num_free * self._pool.page_size
        if allowed:
            view.add(request, row)
        else:
            self._refused, self._num_steps_refused = request, 0
        return allowed

    def _most_growth(self, columns: np.ndarray) -> float:
        """Return the maximum growth that is expected of the pages in use, in tokens."""
        size = self._pool.page_size
        generated, most, is_known, tokens, pages, own, _ = columns
        expected = np.minimum(most, self._lengths.expected(generated))
        more = np.maximum(np.where(is_known > 0, most, expected) - generated, 0)
        # tokens that need a new page; negative if the last page has room. At its end, a request's
        # last page is half full on average.
        missing = tokens - pages * size + size / 2
        order = np.argsort(more, kind="stable")
        more, missing, held = more[order], missing[order], own[order] * size
        after = np.cumsum(missing[::-1])[::-1]  # sum over this request and those that end later
        count = np.arange(len(more), 0, -1)
        return float((count * more + after - (np.cumsum(held) - held)).max())


def _has_known_length(request: Request) -> bool:
    """Return True if only the token limit can end the request."""
    return not (
        request.eos_token_ids
        or request.stop_token_ids
        or request.params.stop
        or request.constraint is not None
    )
