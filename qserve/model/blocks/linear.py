"""Linear layers of the decoder: float, or quantized and prepared for their kernel.

`reader` names the operation that takes the result. Only QuantLinear has a use for it.
"""

import torch
from torch.nn import functional

from qkernels import QuantLinear
from qkernels.input_forms import InputForm, LinearInput
from qkernels.partial_sums import PartReader
from qkernels.prepared import InputRounding


class FloatLinear(torch.nn.Module):
    """y = x W^T + b with a dense weight [N, K]. `names` are the checkpoint's linears in it."""

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.names = names
        self.register_buffer("weight", weight_NK)
        self.register_buffer("bias", bias_N)

    def input_form(self, rows: int) -> InputForm:
        """It takes no other form than a tensor."""
        return None

    def forward(self, x: torch.Tensor, reader: PartReader | None = None) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class SplitLinear(torch.nn.Module):
    """Layers of one input whose weights cannot be one matrix: their outputs stand side by side."""

    def __init__(self, parts: "list[FloatLinear | QuantLinear]") -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def input_form(self, rows: int) -> InputForm:
        """That of every part, where they take 8-bit codes alike, by each row's own scale.

        Digits stay in the workspace until the next product, so only one part could take them.
        """
        first, *others = (part.input_form(rows) for part in self.parts)
        if not isinstance(first, InputRounding) or first.scale is not None:
            return None
        return first if all(each == first for each in others) else None

    def forward(self, x: LinearInput, reader: PartReader | None = None) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


Linear = FloatLinear | QuantLinear | SplitLinear
