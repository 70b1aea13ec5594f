"""The token counts that penalties need, on the device. Knows rows, not requests.

The arithmetic is qkernels' `sample_`.
"""

import math

import torch

from qserve.engine.step_input import HistoryFill
from qserve.engine.transfer import to_device


class TokenHistory:
    """How often each token occurs in the requests with penalties: a table on the device.

    The sampler adds what it draws, on the device, so the counts hold the token of the step in
    flight too. The engine says which row is whose (request_rows.py).
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self.table: torch.Tensor | None = None  # [W, V] int32, made for the first fill

    @property
    def bytes_to_come(self) -> int:
        """Of the table, while no request has asked for it."""
        return 0 if self.table is not None else math.prod(self._shape) * torch.int32.itemsize

    def fill_(self, fill: HistoryFill) -> None:
        """Count a sequence in its row, and nothing else: 1 if in the prompt, 2 per output token."""
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        counts_V = self.table[fill.row].zero_()
        prompt = to_device(fill.prompt_token_ids, self._device)
        output = to_device(fill.output_token_ids, self._device)
        counts_V.index_fill_(0, prompt, 1)
        counts_V.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
