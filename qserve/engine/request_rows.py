"""RequestRows: what does not change between the steps of a running request, as rows of arrays.

A step's arrays are gathered from them, so that a request that decodes costs next to nothing in
Python. Knows requests, and no step. Legend: N rows, X pages of a block table, P words of sampling.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from formats.errors import InputError
from qkernels.sampling.settings import (
    BIAS_END,
    BIAS_START,
    MASK_START,
    NUM_WORDS,
    SampleRow,
    pack_bias,
    pack_row,
)
from qserve.engine.request import Request, Status
from qserve.engine.token_filter import TokenFilter, without
from qserve.structured.constraint import Constraint

# A mask takes 10 to 60 us, most of it in llguidance, which lets other threads run.
FEW_MASKS = 8
MASK_THREADS = 4


class RequestRows:
    """One row for each running request. It is also its row of the table of token counts.

    The workers know no requests: a step tells them rows.
    """

    def __init__(self, num_rows: int) -> None:
        self.tables_NX = np.zeros((num_rows, table_width(1)), np.int32)
        self.words_NP = np.zeros((num_rows, NUM_WORDS), np.int64)
        self.has_bias_N = np.zeros(num_rows, bool)  # it has to be packed in each step
        self.has_mask_N = np.zeros(num_rows, bool)  # it has a mask of its own in each step
        self.mask_follows_N = np.zeros(num_rows, bool)  # which depends on the tokens before
        self.adapter_slots_N = np.full(num_rows, -1, np.int32)  # -1: it has no adapter
        self.state_slots_N = np.full(num_rows, -1, np.int32)  # -1: it has no state
        self.needs_history_N = np.zeros(num_rows, bool)  # penalties, and its counts are not filled
        self._num_pages_N = np.zeros(num_rows, np.int64)
        self._sampled_N = np.zeros(num_rows, np.int64)
        self._owners: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))[::-1]

    def rows_of(self, requests: list[Request]) -> np.ndarray:
        """The rows of some running requests, up to date. New ones get one."""
        rows = np.array([request.row for request in requests], np.int64)
        if rows.min(initial=0) < 0:
            for request in requests:
                if request.row < 0:
                    self._enter(request)
            rows = np.array([request.row for request in requests], np.int64)
        num_pages = np.array([len(request.block_table) for request in requests], np.int64)
        for index in np.flatnonzero(num_pages != self._num_pages_N[rows]):
            self._add_pages(rows[index], requests[index].block_table)
        return rows

    def take_sampled(self, rows_S: np.ndarray) -> None:
        """Note whose rows the newest step samples, in order. A request's last row counts."""
        self._sampled_N[rows_S] = np.arange(len(rows_S))

    def sampled_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows of the newest step's samples that hold the requests' tokens in flight."""
        return self._sampled_N[rows]

    def _enter(self, request: Request) -> None:
        if not self._free:
            self._reclaim()
        row = request.row = self._free.pop()
        self._owners[row] = request
        self._num_pages_N[row] = 0
        sampling = sample_row(request, row)
        self.words_NP[row, :-2] = pack_row(sampling)
        self.words_NP[row, -2:] = 0
        self.has_bias_N[row] = bool(request.params.logit_bias or request.params.min_tokens)
        self.has_mask_N[row] = not (request.constraint is None and request.token_filter is None)
        self.mask_follows_N[row] = request.constraint is not None or (
            request.token_filter is not None and request.token_filter.follows_output
        )
        self.needs_history_N[row] = request.params.has_penalties
        self.adapter_slots_N[row] = request.adapter_slot
        self.state_slots_N[row] = request.state_slot

    def _reclaim(self) -> None:
        """Free the rows of requests that ended, and of those that were preempted."""
        for row, owner in enumerate(self._owners):
            if owner is None:
                continue
            if owner.row != row or owner.status is not Status.RUNNING:
                if owner.row == row:
                    owner.row = -1
                self._owners[row] = None
                self._free.append(row)

    def _add_pages(self, row: int, block_table: list[int]) -> None:
        known, count = self._num_pages_N[row], len(block_table)
        width = self.tables_NX.shape[1]
        if count > width:
            wider = table_width(max(count, 2 * width))
            self.tables_NX = np.pad(self.tables_NX, ((0, 0), (0, wider - width)))
        # kernels read nothing of pages that were given back, but need a number
        self.tables_NX[row, known:count] = np.maximum(block_table[known:], 0)
        self._num_pages_N[row] = count


def table_width(num_pages: int) -> int:
    """Columns of a block table. Multiples of 16: Triton compiles others for themselves."""
    return -(-num_pages // 16) * 16


def sample_row(request: Request, row: int, position: int = 0) -> SampleRow:
    """How to draw the token at a position of a request."""
    params, bias = request.params, request.params.logit_bias
    if not request.may_end_after(position - request.num_prompt_tokens):
        ends = request.stop_token_ids | request.eos_token_ids
        bias += tuple((token, -np.inf) for token in sorted(ends))
    return SampleRow(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        top_k=max(params.top_k, 0),
        seed=request.seed,
        position=position,
        history_row=row if params.has_penalties else -1,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        bias=bias,
    )


def biases(
    requests: list[Request], positions: np.ndarray, has_bias_S: np.ndarray, words_SP: np.ndarray
) -> np.ndarray:
    """The bias entries of a step's samples, whose places are noted in `words_SP`. int64 [E]."""
    entries: list[int] = []
    for index in np.flatnonzero(has_bias_S):
        request = requests[index]
        words_SP[index, BIAS_START] = len(entries)
        entries += pack_bias(sample_row(request, request.row, int(positions[index])))
        words_SP[index, BIAS_END] = len(entries)
    return np.array(entries, np.int64)


def masks(
    requests: list[Request],
    positions: np.ndarray,
    ahead_S: np.ndarray,
    has_mask_S: np.ndarray,
    words_SP: np.ndarray,
    first: int,
) -> np.ndarray:
    """The masks of a step's samples, whose places from `first` on `words_SP` notes. int64 [E].

    `ahead_S`: how many drafts of its request come before each.
    """
    chosen = np.flatnonzero(has_mask_S)
    if ahead_S[chosen].any():
        found = _masks_of_drafts(requests, positions, ahead_S, chosen)
    else:
        of_requests = [requests[i] for i in chosen]
        constraints = [request.constraint for request in of_requests]
        several = map if len(chosen) < FEW_MASKS else _threads().map
        found = list(several(_mask, of_requests, positions[chosen].tolist(), constraints))
    words_SP[chosen, MASK_START] = first + np.arange(len(found)) * len(found[0])
    return np.concatenate(found)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MASK_THREADS, os.cpu_count() or 1), "masks")


def _masks_of_drafts(
    requests: list[Request], positions: np.ndarray, ahead_S: np.ndarray, chosen: np.ndarray
) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    cursor: Constraint | None = None  # of a request with drafts
    for index in chosen:
        request, ahead = requests[index], int(ahead_S[index])
        if ahead == 0:
            cursor = request.constraint
        elif cursor is not None:
            cursor = request.constraint.copy() if ahead == 1 else cursor
            cursor.take(request.drafts[ahead - 1])
        found.append(_mask(request, int(positions[index]), cursor, ahead))
    return found


def _mask(
    request: Request, position: int, constraint: Constraint | None, ahead: int = 0
) -> np.ndarray:
    """What the grammar and the filter of tokens both allow. Where that is nothing: all, and why."""
    token_filter = request.token_filter
    ends = request.stop_token_ids | request.eos_token_ids
    may_end = request.may_end_after(position - request.num_prompt_tokens)
    mask = None if constraint is None else constraint.mask(ends, may_end)
    if token_filter is None:
        return mask
    token_ids = request.token_ids
    if ahead and token_filter.follows_output:
        token_ids = [*token_ids, *request.drafts[:ahead]]
    own = token_filter.mask(token_ids, request.num_prompt_tokens)
    mask = own if mask is None else mask & own
    # The sampler's bias forbids the ends then.
    if not (mask if may_end else without(mask, ends)).any():
        if ahead == 0:
            request.dead_end = dead_end(request)
        elif request.most_emitted is None:  # the next step finds it, if the drafts come true
            request.most_emitted = ahead
        return np.full_like(mask, -1)
    return mask


def token_filter(request: Request, vocab_size: int) -> TokenFilter:
    """The filter that a request asks for. Raises InputError where it leaves nothing to say."""
    params = request.params
    made = TokenFilter(vocab_size, params.allowed_token_ids, params.bad_words_token_ids)
    mask = made.mask(request.token_ids, request.num_prompt_tokens)
    if params.min_tokens:
        mask = without(mask, request.stop_token_ids | request.eos_token_ids)
    if not mask.any():
        raise InputError(f"request {request.request_id}", dead_end(request), "allow more")
    return made


def dead_end(request: Request) -> str:
    """Names the parameters that leave no token."""
    params = request.params
    given = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_token_ids),
        "structured_outputs": request.constraint is not None,
        "min_tokens": params.min_tokens > 0,
    }
    names = [name for name, is_given in given.items() if is_given]
    count = len(request.token_ids) - request.num_prompt_tokens
    return f"{', '.join(names)}: after {count} tokens of output no token is allowed"
