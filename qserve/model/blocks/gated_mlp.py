"""Gated feed-forward. Knows what follows it: a norm."""

from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.linear.plan import LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of

# by the name that config.json gives it
ACTIVATIONS = {"silu": ops.silu_and_mul_into, "gelu_pytorch_tanh": ops.gelu_and_mul_into}


class GatedMlp(torch.nn.Module):
    """down(activation(gate(x)) * up(x)); gate and up come from one matrix."""

    def __init__(self, *, gate_up_proj: Linear, down_proj: Linear, activation: str) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def products(self) -> Iterator[Product]:
        """The quantized products, and the operation that takes each one's result."""
        yield from products_of(self.gate_up_proj, None)
        yield from products_of(self.down_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Of the first linear: what the norm before this block should make."""
        return self.gate_up_proj.plan(rows)

    def forward(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput:
        """The result is for the norm that follows."""
        hidden_T2I = self.gate_up_proj(x_TC, plan)
        down = self.down_proj.plan(hidden_T2I.shape[0], "norm")
        return self.down_proj(self.activate(hidden_T2I, down.input), down)
