"""MaskJobs: computes grammar masks in threads while steps run.

A mask takes 10 to 100 us; a mask of a malicious grammar takes a second. No step waits for a slow
mask. The row of a slow mask is late: its sample is dropped, and the row is planned again when the
mask is ready. The mask is kept, so a row is late at most once per token.

There are two modes. If masks are applied after the launch of a step's forward pass (`late`), they
have until the pass is done, plus PATIENCE_SECONDS. If masks are part of the launch (with drafts,
several ranks or recurrent states), they are started before the step is planned (`prepare`), and a
row without its mask is not planned.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from time import perf_counter

import numpy as np

from qserve.engine.request import Request, Status
from qserve.engine.scheduling.plan import StepPlan
from qserve.engine.step.masks import allowed
from qserve.structured.constraint import Constraint

# Longest wait of a step for masks that have not been slow so far. It does not wait for slow masks.
PATIENCE_SECONDS = 0.005
POLL_SECONDS = 0.0002  # interval at which the device is polled
IDLE_SECONDS = 0.01  # longest wait of an engine that has nothing else to do
# Slow grammars have separate threads, so that other grammars find a free thread. A grammar that is
# slow for the first time still occupies one of the normal threads.
THREADS = min(8, 2 * (os.cpu_count() or 1))
SLOW_THREADS = 1


class _Job:
    """Work that a thread does."""

    _future: Future

    @property
    def future(self) -> Future:
        return self._future

    @property
    def is_done(self) -> bool:
        return self._future.done()


class MaskJob(_Job):
    """Computes the mask of a request's next token. The request gets no token until it is done."""

    def __init__(self, request: Request) -> None:
        """Start the job. The host must know all tokens of the request."""
        self.num_known = request.num_known
        self.is_late = False  # True if a step continued without the mask
        self._constraint = request.constraint
        self._future: Future[np.ndarray | None] = _threads(self._constraint.is_slow).submit(
            allowed, request, request.num_known, request.token_ids, request.constraint
        )

    @property
    def may_take_long(self) -> bool:
        return self.is_late or self._constraint.is_slow

    def mask(self) -> np.ndarray | None:
        """Wait for the mask and return it; None if no token may follow."""
        return self._future.result()


class DraftMasks(_Job):
    """Computes the masks along a request's drafts, with a copy of the grammar's state.

    The engine's thread makes the copy, because it also advances the original and the library does
    not allow concurrent reads. For a schema of 2744 properties a copy takes 5 us after 200 tokens
    and 16 us after 800; for a regular expression 26 us after 8000. The work per draft takes 140 us
    for the schema and 10 us for the expression (one core, llguidance 1.9.1).
    """

    def __init__(self, request: Request, drafts: Sequence[int]) -> None:
        """Start the job. Later tokens of the request do not affect it."""
        self.found: list[np.ndarray | None] = []  # masks computed so far
        self._token_ids = [*request.token_ids]
        cursor = request.constraint.copy()
        self._future = _threads(False).submit(self._follow, request, drafts, cursor)

    def _follow(self, request: Request, drafts: Sequence[int], cursor: Constraint) -> None:
        for draft in drafts:
            cursor.take(draft)
            self._token_ids.append(draft)
            self.found.append(allowed(request, len(self._token_ids), self._token_ids, cursor))
            if self.found[-1] is None:
                return


class MaskJobs:
    """The mask jobs of one engine."""

    def __init__(self, *, waits: bool = False) -> None:
        """`waits`: True if masks are part of the launch, so a row waits for its previous token."""
        self.waits = waits
        self._requests: dict[str, Request] = {}  # requests that have a grammar or will get one

    def add(self, request: Request) -> None:
        """Register a new request that has masks."""
        has_grammar = request.params.structured_outputs is not None
        if has_grammar:
            self._requests[request.request_id] = request
        token_filter = request.token_filter
        if has_grammar or (token_filter is not None and token_filter.follows_output):
            request.follows_last |= self.waits

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def prepare(self) -> None:
        """In the mode `waits`, start the masks of rows whose tokens are all known; wait briefly."""
        if not self.waits:
            return
        ready = [
            request
            for request in self._requests.values()
            if request.constraint is not None and not request.num_pending
        ]
        if ready:
            _wait([_job(request) for request in ready], is_computing=lambda: False)

    def begin(self, plan: StepPlan) -> None:
        """Start the masks of a step that do not depend on an in-flight token."""
        for request, _, _, num_sampled in plan.chunks:
            if num_sampled and request.constraint is not None and request.num_pending == 1:
                _job(request)

    def late(self, plan: StepPlan, is_computing: Callable[[], bool]) -> frozenset[Request]:
        """Wait briefly for the masks of a step. Returns the requests whose masks are late.

        The host must know all earlier tokens of the rows. `is_computing`: returns True while the
        device runs the forward pass.
        """
        requests = [
            chunk.request
            for chunk in plan.chunks
            if chunk.num_sampled
            and chunk.request.constraint is not None
            and chunk.request.status is not Status.FINISHED
        ]
        jobs = [_job(request) for request in requests]
        _wait(jobs, is_computing)
        pairs = zip(requests, jobs, strict=True)
        return frozenset(request for request, job in pairs if not job.is_done)

    def wait_a_little(self) -> None:
        """Wait briefly for masks. For use when no request can run without its mask."""
        jobs = [request.mask_job for request in self._requests.values()]
        futures = [job.future for job in jobs if job is not None and not job.is_done]
        if futures:
            wait(futures, IDLE_SECONDS, FIRST_COMPLETED)


def mask_of(request: Request) -> np.ndarray | None:
    """Wait for the mask of a request's next token and return it; None if no token may follow."""
    return _job(request).mask()


def masks_along(requests: Sequence[Request]) -> list[list[np.ndarray | None]]:
    """Return the masks along the drafts of each request; fewer if some are late.

    A mask of None means that no token may follow.
    """
    begun = [DraftMasks(request, request.drafts) for request in requests]
    wait([each.future for each in begun], PATIENCE_SECONDS)
    for request, each in zip(requests, begun, strict=True):
        request.draft_job = each
    return [list(each.found) for each in begun]


def _job(request: Request) -> MaskJob:
    """Return the job for a request's next token. Starts it if necessary."""
    job = request.mask_job
    if job is None or job.num_known != request.num_known:
        job = request.mask_job = MaskJob(request)
    return job


def _wait(jobs: Sequence[MaskJob], is_computing: Callable[[], bool]) -> None:
    deadline = perf_counter() + PATIENCE_SECONDS
    while missing := [job for job in jobs if not job.is_done]:
        left = deadline - perf_counter()
        if is_computing():
            wait([job.future for job in missing], POLL_SECONDS)
            continue
        hopeful = [job.future for job in missing if not job.may_take_long]
        if left <= 0 or not hopeful:
            for job in missing:
                job.is_late = True
            return
        wait(hopeful, left)


@cache
def _threads(are_slow: bool) -> ThreadPoolExecutor:
    if are_slow:
        return ThreadPoolExecutor(SLOW_THREADS, "slow masks")
    return ThreadPoolExecutor(THREADS, "masks")
