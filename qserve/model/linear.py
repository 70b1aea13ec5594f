"""Linear layers of the decoder: float, or quantized and prepared for their kernel."""

import torch
from torch.nn import functional

from qkernels import QuantLinear
from qkernels.prepared import Codes, InputRounding


class FloatLinear(torch.nn.Module):
    """y = x W^T + b with a dense weight [N, K]."""

    input_rounding = None

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

    @property
    def input_rounding(self) -> InputRounding | None:
        """That of every part, where they round alike by each row's own scale."""
        first, *others = (part.input_rounding for part in self.parts)
        alike = first is not None and first.scale is None and all(each == first for each in others)
        return first if alike else None

    def forward(self, x: torch.Tensor | Codes) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


Linear = FloatLinear | QuantLinear | SplitLinear
