"""Mixture of experts, in the place of a feed-forward.

Legend: T tokens of the step, C hidden size, E experts.
"""

from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.moe.experts import PreparedExperts
from qkernels.moe.routing import Routes, Routing
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.linear import FLOAT_PLAN, FloatLinear, LinearPlan, Product
from qserve.model.blocks.mlp import Mlp
from qserve.parallel.communicator import Communicator, RankPartial


class Router(torch.nn.Module):
    """Selects each token's experts. The product runs in the dtype of its weight."""

    def __init__(
        self,
        routing: Routing,
        weight_EC: torch.Tensor,
        bias_E: torch.Tensor | None = None,
        correction_E: torch.Tensor | None = None,  # float32
        fixed_order: bool = False,  # a token's bits do not depend on the other tokens
    ) -> None:
        super().__init__()
        self.routing, self.fixed_order = routing, fixed_order
        self.register_buffer("weight", weight_EC)
        self.register_buffer("bias", bias_E)
        self.register_buffer("correction", correction_E)

    def forward(self, x_TC: torch.Tensor) -> Routes:
        return ops.route_tokens(
            x_TC, self.weight, self.routing, self.bias, self.correction, self.fixed_order
        )


class SharedExpert(torch.nn.Module):
    """Expert for every token; its gate, if any, multiplies the output by a sigmoid."""

    def __init__(self, mlp: Mlp, gate: FloatLinear | None = None) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = gate

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        plan = self.mlp.plan(x_TC.shape[0])
        out_TC = reduced(self.mlp(ops.in_form(x_TC, plan.input), plan))
        if self.gate is None:
            return out_TC
        share_T1 = self.gate(x_TC)
        if self.gate.fixed_order and share_T1.device.type == "cpu":
            # On a CPU a sigmoid's bits depend on its place in a vector; whole rows are vectors.
            share_T1 = share_T1.expand_as(out_TC).contiguous()
        return torch.sigmoid(share_T1) * out_TC


class MoeMlp(torch.nn.Module):
    """Sum over a token's experts of share * down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        *,
        router: Router,
        experts: PreparedExperts,
        shared: SharedExpert | None = None,
        communicator: Communicator | None = None,  # of ranks that hold shards of each expert
        scales_inputs: bool = False,  # shares multiply inputs; a token has one expert (Llama 4)
    ) -> None:
        super().__init__()
        self.communicator, self.scales_inputs = communicator, scales_inputs
        self.router = router
        self.experts = experts
        self.shared = shared

    def products(self) -> Iterator[Product]:
        """Products whose kernels depend on the number of tokens."""
        yield self.experts, "norm"
        if self.shared is not None:
            yield from self.shared.mlp.products()

    def plan(self, rows: int) -> LinearPlan:
        """The norm before this block outputs a tensor, since the router reads it, too."""
        return FLOAT_PLAN

    def forward(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput | RankPartial:
        """The result goes to the norm that follows."""
        routes = self.router(x_TC)
        shared_TC = None if self.shared is None else self.shared(x_TC)
        if self.scales_inputs:
            x_TC = x_TC * routes.shares_Mk.to(x_TC.dtype)
            routes = routes._replace(shares_Mk=torch.ones_like(routes.shares_Mk))
        out_TC = ops.experts(x_TC, routes, self.experts, None, shared_TC)
        if self.communicator is None:
            return out_TC
        return RankPartial(x=out_TC, communicator=self.communicator)
