"""What a step's rows ask of the sampler, and the token counts that penalties need.

Knows rows, not requests' lives. The arithmetic is qkernels' `sample_`.
"""

import math

import numpy as np
import torch

from qkernels.sample_settings import SampleRow
from qserve.engine.request import Request, Status
from qserve.engine.scheduler import Chunk
from qserve.engine.transfer import to_device


def sample_row(chunk: Chunk, history: "TokenHistory") -> SampleRow:
    """How to draw the token after a chunk."""
    request, params = chunk.request, chunk.request.params
    bias = params.logit_bias
    if not request.may_end_after(chunk.end - request.num_prompt_tokens):
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
        position=chunk.end,
        history_row=history.row_of(request) if params.has_penalties else -1,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        bias=bias,
    )


class TokenHistory:
    """How often each token occurs in the requests with penalties: a table on the device.

    The sampler adds what it draws, on the device, so the counts hold the token of the step in
    flight too. A request owns a row while it runs. One that was preempted may lose it, and gets
    another from the tokens that the host knows, which then are all.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        self._rows: dict[Request, int] = {}
        self.table: torch.Tensor | None = None  # [W, V] int32, made for the first such request

    @property
    def bytes_to_come(self) -> int:
        """Of the table, while no request has asked for it."""
        return 0 if self.table is not None else math.prod(self._shape) * torch.int32.itemsize

    def row_of(self, request: Request) -> int:
        """The request's row, filled when it is new."""
        row = self._rows.get(request)
        if row is None:
            row = self._free_row()
            self._fill(row, request)
            self._rows[request] = row
        return row

    def _free_row(self) -> int:
        for owner in [r for r in self._rows if r.status is not Status.RUNNING]:
            del self._rows[owner]
        used = set(self._rows.values())
        return next(row for row in range(self._shape[0]) if row not in used)

    def _fill(self, row: int, request: Request) -> None:
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        # this step's own token is pending; another would be missing from the counts
        assert request.num_pending <= 1, request
        counts_V = self.table[row].zero_()
        prompt, output = (
            to_device(np.asarray(tokens, np.int64), self._device)
            for tokens in (
                request.token_ids[: request.num_prompt_tokens],
                request.token_ids[request.num_prompt_tokens :],
            )
        )
        counts_V.index_fill_(0, prompt, 1)
        counts_V.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
