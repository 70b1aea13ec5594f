"""RMS norm of what a layer adds to the residual, in the form that the next linear takes."""

import torch

from qkernels import ops
from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput


class RmsNorm(torch.nn.Module):
    """x / rms(x) * weight, of the sum of two tensors [T, C]."""

    def __init__(self, weight_C: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight_C)

    def forward(
        self, x_TC: LinearOutput, residual_TC: torch.Tensor | None, form: InputForm
    ) -> tuple[LinearInput, torch.Tensor]:
        """The norm of the sum, in a form, None for a tensor; the sum.

        `residual_TC` None: x is the sum.
        """
        if residual_TC is None:
            return ops.rms_norm_into(x_TC, self.weight, self.eps, form), x_TC
        return ops.add_rms_norm_into(x_TC, residual_TC, self.weight, self.eps, form)
