"""Linear layers of the decoder: float, or quantized and prepared for their kernel."""

import torch
from torch.nn import functional

from qkernels import QuantLinear


class FloatLinear(torch.nn.Module):
    """y = x W^T + b with a dense weight [N, K]."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight_NK)
        self.register_buffer("bias", bias_N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


Linear = FloatLinear | QuantLinear
