"""Token embedding: the first thing that a decoder does."""

import torch
from torch.nn import functional


class Embedding(torch.nn.Module):
    """Rows of a table [V, C], times a factor."""

    def __init__(self, weight_VC: torch.Tensor, factor: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("weight", weight_VC)
        # rounded to the table's dtype, as transformers rounds Gemma's
        self.factor = torch.tensor(factor, dtype=weight_VC.dtype).item()

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        x_TC = functional.embedding(token_ids_T, self.weight)
        return x_TC if self.factor == 1 else x_TC * self.factor
