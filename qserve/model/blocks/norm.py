"""RMS norm, of what a layer adds to the residual. Gives its result as its reader takes it."""

import torch

from qkernels import input_forms
from qkernels.input_forms import LinearInput
from qkernels.partial_sums import LinearOutput
from qserve.model.blocks.linear import Linear


class RmsNorm(torch.nn.Module):
    """x / rms(x) * weight, of the sum of two tensors [T, C]."""

    def __init__(self, weight_C: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight_C)

    def forward(
        self, x_TC: LinearOutput, residual_TC: torch.Tensor | None, reader: Linear | None
    ) -> tuple[LinearInput, torch.Tensor]:
        """The norm of the sum, in the form that `reader` takes; the sum.

        `residual_TC` None: x is the sum. `reader` None: the result is a tensor.
        """
        form = None if reader is None else reader.input_form(x_TC.shape[0])
        if residual_TC is None:
            return input_forms.rms_norm(x_TC, self.weight, self.eps, form), x_TC
        return input_forms.add_rms_norm(x_TC, residual_TC, self.weight, self.eps, form)
