"""Dense MLP in parallel with experts, each with its own norms.

T: tokens of the step. C: hidden size.
"""

from collections.abc import Iterator

import torch

from qkernels.operands.forms import LinearInput
from qserve.model.blocks.linear import LinearPlan, Product
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.moe import MoeMlp
from qserve.model.blocks.norm import BranchEnd, Norm


class DenseAndExperts(torch.nn.Module):
    """mlp_norm(mlp(x)) + experts_end(experts(experts_norm(residual))).

    x is the normed residual stream. The router reads the residual stream without a norm.
    """

    def __init__(
        self,
        *,
        mlp: Mlp,
        mlp_norm: Norm,
        experts: MoeMlp,
        experts_norm: Norm,
        experts_end: BranchEnd,
    ) -> None:
        super().__init__()
        self.mlp, self.mlp_norm = mlp, mlp_norm
        self.experts, self.experts_norm, self.experts_end = experts, experts_norm, experts_end
        self._sum = Norm(None, 0.0)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products of the MLP and the experts."""
        yield from self.mlp.products()
        yield from self.experts.products()

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the MLP's first linear."""
        return self.mlp.plan(rows)

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, residual_TC: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum [T, C], the input of the next norm."""
        dense_TC, _ = self.mlp_norm(self.mlp(x_TC, plan), None, None)
        experts_plan = self.experts.plan(residual_TC.shape[0])
        normed_TC, _ = self.experts_norm(residual_TC, None, experts_plan.input)
        found = self.experts(normed_TC, experts_plan, residual_TC)
        _, sum_TC = self._sum(self.experts_end(found), dense_TC, None)
        return sum_TC
