"""Token counts for penalties, on the device. qkernels' `sample_` uses them."""

import math

import torch

from qserve.engine.step.step_input import HistoryFill
from qserve.engine.step.transfer import to_device


class TokenHistory:
    """How often each token occurs in the requests with penalties: a table on the device.

    The sampler adds the tokens that it samples, on the device, so the counts include the token of
    the in-flight step. The engine assigns rows to requests (request_rows.py).
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self.table: torch.Tensor | None = None  # [W, V] int32, allocated at the first fill

    @property
    def bytes_to_come(self) -> int:
        """Bytes of the table while it is not allocated; 0 afterwards."""
        return 0 if self.table is not None else math.prod(self._shape) * torch.int32.itemsize

    def fill_(self, fill: HistoryFill) -> None:
        """Set a row to the counts of a sequence: 1 if in the prompt, plus 2 per output token."""
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        counts_V = self.table[fill.row].zero_()
        prompt = to_device(fill.prompt_token_ids, self._device)
        output = to_device(fill.output_token_ids, self._device)
        counts_V.index_fill_(0, prompt, 1)
        counts_V.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
