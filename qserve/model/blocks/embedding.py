"""Token embedding: the first thing that a decoder does."""

import torch
from torch.nn import functional


class Embedding(torch.nn.Module):
    """Rows of a table [V, C]."""

    def __init__(self, weight_VC: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight_VC)

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids_T, self.weight)
