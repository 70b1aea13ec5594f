"""Attention with values narrower than keys, and with gates.

Letters in names:

    T: tokens of the step
    C: hidden size
    H: heads
    J: KV heads
    D: channels of a key
    V: channels of a value
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.model.blocks.gates import repeated
from qserve.model.blocks.linear import FLOAT_PLAN, Linear, LinearPlan, Product, products_of


class UnevenAttention(Attention):
    """Attention with values of V channels and with gates.

    Pages store values with the width of keys; the channels after the first V are zeros.
    """

    def __init__(
        self,
        *arguments: Any,
        value_dim: int,
        value_factor: float = 1.0,  # multiplies the values
        gates: Linear | None = None,  # outputs one gate per head; None: see is_gated
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.softplus,  # of gates
        **blocks: Any,
    ) -> None:
        """Other arguments are Attention's. `is_gated`: qkv_proj outputs H V gates after queries."""
        super().__init__(*arguments, **blocks)
        self.value_dim, self.value_factor, self.gates = value_dim, value_factor, gates
        self.activation = activation

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from super().products()
        if self.gates is not None:
            yield from products_of(self.gates, None)

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear; with `gates`, a plan with a tensor as input."""
        return super().plan(rows) if self.gates is None else FLOAT_PLAN

    @property
    def _qkv_consumer(self) -> None:
        """None, because queries, keys and values are split from a tensor."""
        return None

    def _parts(self, x_TC: LinearInput, plan: LinearPlan) -> Sequence[LinearOutput]:
        gate: list[torch.Tensor] = []
        if self.gates is not None:
            gate = [reduced(self.gates(x_TC))]
            plan = self.qkv_proj.plan(x_TC.shape[0])
            x_TC = ops.in_form(x_TC, plan.input)
        H, J, D, V = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        widths = (H * D, *((H * V,) if self.is_gated else ()), J * D, J * V)
        q, *merged, k, v = reduced(self.qkv_proj(x_TC, plan)).split(widths, 1)
        v_TJV = v.unflatten(1, (J, V)) * self.value_factor
        v_TJD = functional.pad(v_TJV, (0, D - V))
        return (q.unflatten(1, (H, D)), *gate, *merged, k.unflatten(1, (J, D)), v_TJD)

    def _attended(
        self, q: torch.Tensor, gate: LinearOutput | None, step: StepInputs, cache: PagedKv
    ) -> LinearOutput:
        """Return o_proj of the gated attention of `q`, queries after rope, over the cache."""
        out_THV = self._scored(q, step, cache, None)[..., : self.value_dim]
        if gate is not None:
            gate_THV = gate.float().unflatten(1, (self.num_heads, -1))
            if gate.device.type == "cpu":
                gate_THV = repeated(gate_THV, out_THV)
            out_THV = out_THV * self.activation(gate_THV).to(out_THV.dtype)
        output = self.o_proj.plan(q.shape[0], "norm")
        return self.o_proj(ops.in_form(out_THV.flatten(1), output.input), output)
