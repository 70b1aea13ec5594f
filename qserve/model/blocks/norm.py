"""RMS norm of what a layer adds to the residual, in the form that the next linear takes."""

from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.parallel.communicator import RankPartial


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The result of attention or feed-forward, and what is done to it before it is added."""

    x_TC: LinearOutput | RankPartial
    branch: ops.Branch

    @property
    def shape(self) -> torch.Size:
        return self.x_TC.shape


BranchOutput = LinearOutput | RankPartial | Changed


class RmsNorm(torch.nn.Module):
    """x / rms(x) * weight, of the sum of two tensors [T, C]; without a weight, the sum."""

    def __init__(self, weight_C: torch.Tensor | None, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight_C)

    def forward(
        self, x_TC: BranchOutput, residual_TC: torch.Tensor | None, form: InputForm
    ) -> tuple[LinearInput, torch.Tensor]:
        """The norm of the sum, in a form, None for a tensor; the sum.

        `residual_TC` None: x is the sum.
        """
        if residual_TC is None:
            if self.weight is None:
                return ops.in_form(x_TC, form), x_TC
            return ops.rms_norm_into(x_TC, self.weight, self.eps, form), x_TC
        branch = ops.Branch()
        if isinstance(x_TC, Changed):
            x_TC, branch = x_TC.x_TC, x_TC.branch
        add_rms_norm_into = ops.add_rms_norm_into
        if isinstance(x_TC, RankPartial):
            x_TC, add_rms_norm_into = x_TC.x, x_TC.communicator.add_rms_norm_into
        return add_rms_norm_into(x_TC, residual_TC, self.weight, self.eps, form, branch)


class BranchEnd(torch.nn.Module):
    """A norm and a factor of what attention or feed-forward gives; both may be missing."""

    def __init__(
        self, weight_C: torch.Tensor | None = None, eps: float = 0.0, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.eps, self.factor = eps, factor
        self.register_buffer("weight", weight_C)

    def forward(self, x_TC: LinearOutput | RankPartial) -> BranchOutput:
        """Nothing is computed here: the norm that adds x to the residual does it on the way."""
        if self.weight is None and self.factor == 1:
            return x_TC
        branch = ops.Branch(norm_C=self.weight, eps=self.eps, factor=self.factor)
        return Changed(x_TC=x_TC, branch=branch)
