"""Classifier: the matrix of labels, or the two linears of a ranker, instead of the head.

S: rows. C: hidden size. H: features between the two linears.
"""

import torch
from torch.nn import functional


class Classifier(torch.nn.Module):
    """Computes logits of labels from hidden states after the last norm."""

    def __init__(self, weight_LC: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight_LC)

    def forward(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Return logits [S, labels] in float32."""
        return (hidden_SC @ self.weight.T).float()


class RankerHead(torch.nn.Module):
    """Computes one score: a linear, ReLU, a second linear, and a fixed offset."""

    def __init__(
        self,
        first: tuple[torch.Tensor, torch.Tensor],  # weight [H, C] and bias [H]
        last: tuple[torch.Tensor, torch.Tensor],  # weight [1, H] and bias [1]
        offset: float,
    ) -> None:
        super().__init__()
        self.offset = offset
        for name, tensor in zip(("weight", "bias"), first, strict=True):
            self.register_buffer(f"first_{name}", tensor)
        for name, tensor in zip(("weight", "bias"), last, strict=True):
            self.register_buffer(f"last_{name}", tensor)

    def forward(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Return scores [S, 1] in float32."""
        inner_SH = functional.relu(functional.linear(hidden_SC, self.first_weight, self.first_bias))
        return functional.linear(inner_SH, self.last_weight, self.last_bias).float() + self.offset
