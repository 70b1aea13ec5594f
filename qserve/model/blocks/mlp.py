"""Dense MLP, gated or not. Its result is the input of the next norm."""

from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qkernels.rowwise.spec import ActKind
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of

# name in config.json -> kind
ACTIVATIONS: dict[str, ActKind] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "swiglu_oai": "swiglu_oai",
}


class Mlp(torch.nn.Module):
    """down(activation(up(x))), or if gated down(activation(gate(x)) * up(x)).

    If gated, `up_proj` is one matrix that computes gate, then up.
    """

    def __init__(
        self,
        *,
        up_proj: Linear,
        down_proj: Linear,
        activation: str,
        gated: bool = True,
        gate_factor: float = 1.0,
        limit: float | None = None,
        limits_gates: bool = False,
        alpha: float = 1.0,
    ) -> None:
        """`activation`: a key of ACTIVATIONS. `gate_factor`: multiplies the activation's input.

        `limit`: clamps the activation's result (ActSpec); with `limits_gates`, its input. `alpha`:
        number of "swiglu_oai".
        """
        super().__init__()
        self.gate_factor, self.gate_limit = gate_factor, limit if limits_gates else None
        after = None if limits_gates else limit
        kind = ACTIVATIONS[activation]
        self.activation = ops.ActSpec(kind=kind, gated=gated, limit=after, alpha=alpha)
        self.up_proj = up_proj
        self.down_proj = down_proj

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.up_proj, None)
        yield from products_of(self.down_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear, which sets the output form of the norm before it."""
        return self.up_proj.plan(rows)

    def forward(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput:
        """Return the MLP's result, the input of the next norm."""
        hidden_TI = self.up_proj(x_TC, plan)
        if self.gate_factor != 1:
            hidden_TI = reduced(hidden_TI)
            hidden_TI[:, : hidden_TI.shape[1] // 2] *= self.gate_factor
        if self.gate_limit is not None:
            gate, up = reduced(hidden_TI).chunk(2, dim=-1)
            limits = -self.gate_limit, self.gate_limit
            hidden_TI = torch.cat([gate.clamp(max=limits[1]), up.clamp(*limits)], -1)
        down = self.down_proj.plan(hidden_TI.shape[0], "norm")
        return self.down_proj(ops.activate(hidden_TI, self.activation, down.input), down)
