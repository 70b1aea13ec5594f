"""Mixture of experts, used instead of a dense MLP.

T: tokens of the step. C: hidden size. E: experts.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.moe.adapted.weights import ExpertAdapters, ExpertLora
from qkernels.moe.experts import PreparedExperts
from qkernels.moe.routing import TINY, Routes, Routing
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.gates import repeated
from qserve.model.blocks.linear import (
    FLOAT_PLAN,
    AdaptedRows,
    FloatLinear,
    Linear,
    LinearPlan,
    Product,
    applied,
    products_of,
)
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import Norm
from qserve.parallel.communicator import Communicator, RankPartial
from qserve.parallel.expert_exchange import ExpertExchange


class Router(torch.nn.Module):
    """Selects the experts of each token. The product runs in the dtype of its weight.

    `norm`: applied to the input. `expert_scale_E`: multiplies the routing weights.
    """

    def __init__(
        self,
        routing: Routing,
        weight_EC: torch.Tensor,
        bias_E: torch.Tensor | None = None,
        correction_E: torch.Tensor | None = None,  # float32
        norm: Norm | None = None,
        expert_scale_E: torch.Tensor | None = None,  # float32
        fixed_order: bool = False,  # True: the bits of a token do not depend on other tokens
    ) -> None:
        super().__init__()
        self.routing, self.norm, self.fixed_order = routing, norm, fixed_order
        self.register_buffer("weight", weight_EC)
        self.register_buffer("bias", bias_E)
        self.register_buffer("correction", correction_E)
        self.register_buffer("expert_scale", expert_scale_E)

    def forward(self, x_TC: torch.Tensor, numbers_E: torch.Tensor | None = None) -> Routes:
        """Route tokens. `numbers_E`: local expert numbers (ops.route); None: all are here."""
        if self.norm is not None:
            x_TC, _ = self.norm(x_TC, None, None)
        scaled = self.expert_scale is not None
        routes = ops.route_tokens(
            x_TC,
            self.weight,
            self.routing,
            self.bias,
            self.correction,
            self.fixed_order,
            None if scaled else numbers_E,
        )
        if not scaled:
            return routes
        ids_Mk = routes.ids_Mk.long()
        weights_Mk = routes.weights_Mk * self.expert_scale[ids_Mk]
        if numbers_E is None:
            return routes._replace(weights_Mk=weights_Mk)
        return Routes(numbers_E[ids_Mk], weights_Mk)


class TableRouter(torch.nn.Module):
    """Router whose table has the experts of each token. Scores weigh them (sqrtsoftplus).

    As in Router, the product runs in the dtype of its weight.
    """

    def __init__(
        self,
        routing: Routing,
        weight_EC: torch.Tensor,
        table_Vk: torch.Tensor,  # int32
    ) -> None:
        super().__init__()
        self.routing = routing
        self.register_buffer("weight", weight_EC)
        self.register_buffer("table", table_Vk)

    def forward(
        self, x_TC: torch.Tensor, numbers_E: torch.Tensor | None, token_ids_T: torch.Tensor
    ) -> Routes:
        """Route tokens. Arguments are those of Router.forward."""
        logits_TE = functional.linear(x_TC.to(self.weight.dtype), self.weight)
        ids_Tk = self.table[token_ids_T.long().clamp(0, len(self.table) - 1)]
        scores_Tk = functional.softplus(logits_TE.float()).sqrt().gather(1, ids_Tk.long())
        weights_Tk = scores_Tk / (scores_Tk.sum(-1, keepdim=True) + TINY)
        ids_Tk = ids_Tk if numbers_E is None else numbers_E[ids_Tk.long()]
        return Routes(ids_Tk, weights_Tk * self.routing.factor)


class SharedExpert(torch.nn.Module):
    """Expert that runs for every token. If it has a gate, sigmoid(gate(x)) scales its output."""

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
            share_T1 = repeated(share_T1, out_TC)
        return torch.sigmoid(share_T1) * out_TC


class ExpertSlots:
    """Adapter slots of a layer's experts."""

    def __init__(self, rows: AdaptedRows) -> None:
        self.rows = rows
        self._products: list[ExpertLora] = []

    def add(self, lora: ExpertLora) -> None:
        """Add the adapters of gate_up, then of down."""
        self._products.append(lora)

    def of_step(self) -> ExpertAdapters | None:
        """Return the adapters of the running step's rows; None: no row has one."""
        if self.rows.slots_T is None:
            return None
        gate_up, down = self._products
        return ExpertAdapters(gate_up=gate_up, down=down, slots_M=self.rows.slots_T)


class MoeMlp(torch.nn.Module):
    """Sum over a token's experts of routing weight * down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        *,
        router: Router | TableRouter,
        experts: PreparedExperts,
        shared: SharedExpert | None = None,
        # ranks that hold shards of each expert, or some of the experts
        communicator: Communicator | None = None,
        numbers_E: torch.Tensor | None = None,  # local numbers of experts; None: all are here
        scales_inputs: bool = False,  # True: routing weights multiply inputs; one expert (Llama 4)
        before: Linear | None = None,  # projects the experts' input (Nemotron 3's latent)
        after: Linear | None = None,  # projects the sum of their outputs
        exchange: ExpertExchange | None = None,  # engines that have the other experts
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.before, self.after = before, after
        self.communicator, self.scales_inputs = communicator, scales_inputs
        self.router = router
        self.experts = experts
        self.shared = shared
        self.adapters: ExpertSlots | None = None  # set with --lora-experts
        self.register_buffer("numbers", numbers_E)

    def products(self) -> Iterator[Product]:
        """Yield the products, each with the operation that consumes its result."""
        yield self.experts, "norm"
        for linear in (self.before, self.after):
            if linear is not None:
                yield from products_of(linear, None)
        if self.shared is not None:
            yield from self.shared.mlp.products()

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, because the router reads the same norm."""
        return FLOAT_PLAN

    def forward(
        self,
        x_TC: LinearInput,
        plan: LinearPlan,
        routed_TC: torch.Tensor | None = None,
        token_ids_T: torch.Tensor | None = None,
    ) -> LinearOutput | RankPartial:
        """Return the block's result, the input of the next norm.

        `routed_TC`: input of the router; None: x. `token_ids_T`: for a router with a table.
        """
        if self.exchange is not None:
            return self._exchanged(x_TC)
        routed_TC = x_TC if routed_TC is None else routed_TC
        if isinstance(self.router, TableRouter):
            routes = self.router(routed_TC, self.numbers, token_ids_T)
        else:
            routes = self.router(routed_TC, self.numbers)
        shared_TC = None if self.shared is None else self.shared(x_TC)
        if self.scales_inputs:
            x_TC = x_TC * routes.weights_Mk.to(x_TC.dtype)
            routes = routes._replace(weights_Mk=torch.ones_like(routes.weights_Mk))
        adapters = None if self.adapters is None else self.adapters.of_step()
        if self.before is not None:
            x_TC = applied(self.before, x_TC)
            out_TC = ops.experts(x_TC, routes, self.experts, adapters=adapters)
            out_TC = applied(self.after, reduced(out_TC))
            out_TC = out_TC if shared_TC is None else out_TC + shared_TC
        else:
            out_TC = ops.experts(x_TC, routes, self.experts, None, shared_TC, adapters)
        if self.communicator is None:
            return out_TC
        return RankPartial(x=out_TC, communicator=self.communicator)

    def _exchanged(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Compute with the experts of all engines. All engines call this in the same step."""
        shared_TC = None if self.shared is None or not len(x_TC) else self.shared(x_TC)
        rows_MC = self.exchange.gather(x_TC)
        routes = self.router(rows_MC, self.numbers)
        if self.scales_inputs:
            rows_MC = rows_MC * routes.weights_Mk.to(rows_MC.dtype)
            routes = routes._replace(weights_Mk=torch.ones_like(routes.weights_Mk))
        out_TC = self.exchange.scatter(reduced(ops.experts(rows_MC, routes, self.experts)))
        return out_TC if shared_TC is None else out_TC + shared_TC

    def compute_for_others(self, x_0C: torch.Tensor) -> None:
        """Take part in a layer of a step in which this engine has no rows. `x_0C`: no rows."""
        self._exchanged(x_0C)
