"""RequestRows: per-request values that stay constant between steps, as rows of arrays.

A step's arrays are gathered from these rows, so a decoding request costs almost no Python time.
N: rows. X: pages of a block table. P: words of sampling parameters.
"""

from itertools import chain

import numpy as np

from qkernels.sampling.words import (
    BIAS_END,
    BIAS_START,
    NUM_WORDS,
    POSITION,
    SampleRow,
    pack_bias,
    pack_row,
)
from qserve.engine.request import Request, Status


class RequestRows:
    """One row per running request. The workers refer to requests by their row numbers.

    The row number is also the request's row in the table of token counts.
    """

    def __init__(self, num_rows: int) -> None:
        self.tables_NX = np.zeros((num_rows, table_width(1)), np.int32)
        self.words_NP = np.zeros((num_rows, NUM_WORDS), np.int64)
        self._has_bias_N = np.zeros(num_rows, bool)
        # first position at which the output may end; before it, end tokens have a bias
        self._may_end_from_N = np.zeros(num_rows, np.int64)
        # (bias entries before that position, bias entries from that position on)
        self._biases: list[tuple[list[int], list[int]]] = [([], [])] * num_rows
        self.has_mask_N = np.zeros(num_rows, bool)  # True: needs a mask in each step
        self.mask_follows_N = np.zeros(num_rows, bool)  # True: the mask depends on earlier tokens
        self.has_grammar_N = np.zeros(num_rows, bool)  # True: the mask may be slow
        self.adapter_slots_N = np.full(num_rows, -1, np.int32)  # -1: no adapter
        self.state_slots_N = np.full(num_rows, -1, np.int32)  # -1: no state
        self.rope_shifts_N = np.zeros(num_rows, np.int64)
        self.has_rope_shifts = False  # True once a request had such a shift
        self.prompt_lengths_N = np.zeros(num_rows, np.int64)
        self.output_window = 0  # of all requests (Request.output_window)
        self.has_media_tokens = False  # True once a request had tokens with other experts
        # True: has penalties, and the device lacks its token counts
        self.needs_history_N = np.zeros(num_rows, bool)
        self._is_plain = [False] * num_rows  # True: no bias, mask, penalties or adapter
        self._num_pages_N = np.zeros(num_rows, np.int64)
        self._sampled_N = np.zeros(num_rows, np.int64)
        self._owners: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))[::-1]

    def rows_of(self, requests: list[Request]) -> np.ndarray:
        """Update the rows of running requests and return them. New requests get a row."""
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

    def are_plain(self, requests: list[Request]) -> bool:
        """Update the rows of running requests. Returns True if all are plain.

        A plain request has no bias, mask, penalties or adapter. For a few requests this is faster
        than `rows_of`.
        """
        for request in requests:
            if request.row < 0:
                self._enter(request)
            if len(request.block_table) != self._num_pages_N[request.row]:
                self._add_pages(request.row, request.block_table)
        return all(self._is_plain[request.row] for request in requests)

    def take_sampled(self, rows_S: np.ndarray) -> None:
        """Record which request each sample of the newest step belongs to, in order.

        If a request has several samples, the last one counts.
        """
        self._sampled_N[rows_S] = np.arange(len(rows_S))

    def sampled_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices of the requests' in-flight tokens in the newest step's samples."""
        return self._sampled_N[rows]

    def biases(self, rows_S: np.ndarray, words_SP: np.ndarray) -> np.ndarray:
        """Return the bias entries of a step's samples, int64 [E], and set their word ranges."""
        (chosen,) = np.nonzero(self._has_bias_N[rows_S])
        if not len(chosen):
            return np.zeros(0, np.int64)
        rows = rows_S[chosen]
        may_end = words_SP[chosen, POSITION] >= self._may_end_from_N[rows]
        biases = self._biases
        found = [
            biases[row][late] for row, late in zip(rows.tolist(), may_end.tolist(), strict=True)
        ]
        counts = np.array([len(entries) for entries in found], np.int64)
        words_SP[chosen, BIAS_END] = ends = np.cumsum(counts)
        words_SP[chosen, BIAS_START] = ends - counts
        return np.array(list(chain.from_iterable(found)), np.int64)

    def replaced(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the slots of tokens: those of the output replace tokens that left the window."""
        if not self.output_window:
            return positions
        firsts = self.prompt_lengths_N[rows]
        after = np.maximum(positions - firsts, 0)  # index in the output
        return np.minimum(positions, firsts) + after % self.output_window

    def num_keys(self, rows_R: np.ndarray, ends_R: np.ndarray) -> np.ndarray:
        """Return the number of keys that the last row of each chunk attends to."""
        if not self.output_window:
            return ends_R
        return np.minimum(ends_R, self.prompt_lengths_N[rows_R] + self.output_window)

    def recount(self, requests: list[Request]) -> None:
        """Refill token counts after a truncated verify, which counted dropped tokens."""
        for request in requests:
            if request.max_emitted is not None:
                self.needs_history_N[request.row] = request.params.has_penalties

    def _enter(self, request: Request) -> None:
        if not self._free:
            self._reclaim()
        row = request.row = self._free.pop()
        self._owners[row] = request
        self._num_pages_N[row] = 0
        sampling = sample_row(request, row)
        self.words_NP[row, :-2] = pack_row(sampling)
        self.words_NP[row, -2:] = 0
        self._has_bias_N[row] = bool(request.params.logit_bias or request.params.min_tokens)
        if self._has_bias_N[row]:
            first = request.num_prompt_tokens
            may_end_from = self._may_end_from_N[row] = first + request.params.min_tokens
            early, late = sample_row(request, row, first), sample_row(request, row, may_end_from)
            self._biases[row] = pack_bias(early), pack_bias(late)
        self.has_mask_N[row] = not (request.constraint is None and request.token_filter is None)
        self.has_grammar_N[row] = request.constraint is not None
        self.mask_follows_N[row] = request.constraint is not None or (
            request.token_filter is not None and request.token_filter.follows_output
        )
        self.needs_history_N[row] = request.params.has_penalties
        self.adapter_slots_N[row] = request.adapter_slot
        self._is_plain[row] = not (
            self._has_bias_N[row] or self.has_mask_N[row] or request.params.has_penalties
        )
        self._is_plain[row] &= request.adapter_slot < 0
        self.state_slots_N[row] = request.state_slot
        self.rope_shifts_N[row] = request.rope_shift
        self.has_rope_shifts |= request.rope_positions is not None
        self.prompt_lengths_N[row] = request.num_prompt_tokens
        self.output_window = request.output_window
        self.has_media_tokens |= request.is_media_N is not None

    def _reclaim(self) -> None:
        """Free the rows of finished and preempted requests."""
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
        # Kernels do not read freed pages, but need a valid page number.
        self.tables_NX[row, known:count] = np.maximum(block_table[known:], 0)
        self._num_pages_N[row] = count


def table_width(num_pages: int) -> int:
    """Return the columns of a block table: a multiple of 16, for which Triton specializes."""
    return -(-num_pages // 16) * 16


def sample_row(request: Request, row: int, position: int = 0) -> SampleRow:
    """Return the sampling parameters of a request's token at a position."""
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
