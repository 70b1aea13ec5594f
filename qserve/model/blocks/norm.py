"""Norms of the residual stream, with outputs in the next linear's form, and ends of branches."""

from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput
from qkernels.rowwise.spec import PLAIN, NormKind
from qserve.parallel.communicator import RankPartial


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The output of attention or MLP, with the norm and factor to apply before it is added."""

    x_TC: LinearOutput | RankPartial
    branch: ops.Branch

    @property
    def shape(self) -> torch.Size:
        return self.x_TC.shape


BranchOutput = LinearOutput | RankPartial | Changed


class Norm(torch.nn.Module):
    """Norm of the sum of two tensors [T, C]. Without a weight it only adds (ops.NormSpec)."""

    def __init__(
        self,
        weight_C: torch.Tensor | None,
        eps: float,
        kind: NormKind = "rms",
        bias_C: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.kind = eps, kind
        self.register_buffer("weight", weight_C)
        self.register_buffer("bias", bias_C)
        self._spec = self._made_spec()

    @property
    def spec(self) -> ops.NormSpec | None:
        """The norm's spec; None: nothing is normalized."""
        spec, weight_C = self._spec, self.weight
        if spec is not None and (spec.weight_C is not weight_C or spec.bias_C is not self.bias):
            self._spec = spec = self._made_spec()
        return spec

    def _made_spec(self) -> ops.NormSpec | None:
        """Create the spec. It is cached, because a step of 32 layers reads it 65 times."""
        if self.weight is None:
            return None
        return ops.NormSpec(kind=self.kind, weight_C=self.weight, bias_C=self.bias, eps=self.eps)

    def forward(
        self, x_TC: BranchOutput, residual_TC: torch.Tensor | None, form: InputForm
    ) -> tuple[LinearInput, torch.Tensor]:
        """Return the norm of the sum, and the sum.

        `residual_TC`: None: x is the sum. `form`: form of the norm's output; None: a tensor.
        """
        branch, spec = PLAIN, self.spec
        if isinstance(x_TC, Changed):
            x_TC, branch = x_TC.x_TC, x_TC.branch
        if isinstance(x_TC, RankPartial):
            if x_TC.row_sum is not None:
                return x_TC.row_sum.norm(residual_TC, spec, form, branch)
            return x_TC.communicator.norm(x_TC.x, residual_TC, spec, form, branch)
        if residual_TC is None and spec is None:
            return ops.in_form(x_TC, form), x_TC
        return ops.norm(x_TC, residual_TC, spec, form, branch)


class BranchEnd(torch.nn.Module):
    """End of a branch: an optional norm and factor for the output of attention or MLP."""

    def __init__(self, norm: Norm | None = None, factor: float = 1.0) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(self, x_TC: LinearOutput | RankPartial) -> BranchOutput:
        """Attach the norm and factor to x. The norm that adds x to the residual applies them."""
        if self.norm is None and self.factor == 1:
            return x_TC
        spec = None if self.norm is None else self.norm.spec
        return Changed(x_TC=x_TC, branch=ops.Branch(norm=spec, factor=self.factor))
