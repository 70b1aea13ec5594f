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


class SplitLinear(torch.nn.Module):
    """Layers of one input whose weights cannot be one matrix: their outputs stand side by side."""

    def __init__(self, parts: "list[FloatLinear | QuantLinear]") -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


Linear = FloatLinear | QuantLinear | SplitLinear
