"""A mixture of experts in place of a feed-forward. Knows what follows it: a norm.

Legend: T tokens of the step, C hidden size, E experts.
"""

from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.linear.plan import LinearInput
from qkernels.moe.experts import PreparedExperts
from qkernels.moe.routing import Routes, Routing
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.gated_mlp import GatedMlp
from qserve.model.blocks.linear import FLOAT_PLAN, FloatLinear, LinearPlan, Product
from qserve.parallel.communicator import Communicator, RankPartial


class Router(torch.nn.Module):
    """The choice of each token's experts. Its weight's dtype is that of the product."""

    def __init__(
        self,
        routing: Routing,
        weight_EC: torch.Tensor,
        bias_E: torch.Tensor | None = None,
        correction_E: torch.Tensor | None = None,  # float32
    ) -> None:
        super().__init__()
        self.routing = routing
        self.register_buffer("weight", weight_EC)
        self.register_buffer("bias", bias_E)
        self.register_buffer("correction", correction_E)

    def forward(self, x_TC: torch.Tensor) -> Routes:
        return ops.route_tokens(x_TC, self.weight, self.routing, self.bias, self.correction)


class SharedExpert(torch.nn.Module):
    """An expert of every token; a gate, where there is one, multiplies it by a sigmoid."""

    def __init__(self, mlp: GatedMlp, gate: FloatLinear | None = None) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = gate

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        plan = self.mlp.plan(x_TC.shape[0])
        out_TC = reduced(self.mlp(ops.in_form(x_TC, plan.input), plan))
        return out_TC if self.gate is None else torch.sigmoid(self.gate(x_TC)) * out_TC


class MoeMlp(torch.nn.Module):
    """The sum over a token's experts of share * down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        *,
        router: Router,
        experts: PreparedExperts,
        shared: SharedExpert | None = None,
        communicator: Communicator | None = None,  # of ranks that have parts of each expert
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.router = router
        self.experts = experts
        self.shared = shared

    def products(self) -> Iterator[Product]:
        """The products whose kernels depend on the number of tokens."""
        yield self.experts, "norm"
        if self.shared is not None:
            yield from self.shared.mlp.products()

    def plan(self, rows: int) -> LinearPlan:
        """The norm before this block makes a tensor: the router reads it, too."""
        return FLOAT_PLAN

    def forward(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput | RankPartial:
        """The result is for the norm that follows."""
        routes = self.router(x_TC)
        shared_TC = None if self.shared is None else self.shared(x_TC)
        out_TC = ops.experts(x_TC, routes, self.experts, None, shared_TC)
        if self.communicator is None:
            return out_TC
        return RankPartial(x=out_TC, communicator=self.communicator)
