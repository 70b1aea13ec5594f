"""Gated delta net, a mixer with state slots instead of pages.

T: tokens of the step. C: hidden size. H: value heads. V: value dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.delta_net.reference import recent_width
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import FLOAT_PLAN, Linear, LinearPlan, Product, products_of
from qserve.model.blocks.states.state import StateBlock, StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of one layer's delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


class DeltaNet(StateBlock):
    """The delta net of one layer: projections, convolution, state update and readout."""

    def __init__(
        self,
        shape: DeltaShape,
        *,
        in_proj: Linear,  # outputs queries, keys, values, and the norm's gate z
        gates: Linear,  # outputs b and a of each value head
        out_proj: Linear,
        conv_weight: torch.Tensor,  # [channels, taps]
        a_log: torch.Tensor,  # float32 [H]
        dt_bias: torch.Tensor,  # float32 [H]
        norm: torch.Tensor,  # [V]
        eps: float,
        write_factor: float = 1.0,  # multiplies the update of a state
        kernel: str | None = None,  # kernel of the operations on states, selected by name
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.shape, self.eps, self.write_factor = shape, eps, write_factor
        self.in_proj, self.gates, self.out_proj = in_proj, gates, out_proj
        self.register_buffer("conv_weight", conv_weight)
        self.register_buffer("a_log", a_log)
        self.register_buffer("dt_bias", dt_bias)
        self.register_buffer("norm", norm)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.in_proj, None)
        yield from products_of(self.gates, None)
        yield from products_of(self.out_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, because `gates` reads the same norm."""
        return FLOAT_PLAN

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of the layer's states. The arguments are ignored."""
        shape = self.shape
        return StateSpec(
            channels=shape.channels,
            taps=shape.taps,
            memory=(shape.value_heads, shape.key_dim, shape.value_dim),
            dtype=self.conv_weight.dtype,
            inputs=recent_width(shape.keys, shape.values, shape.value_heads),
        )

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: StateSlots
    ) -> LinearOutput:
        """Update the requests' states with the step's tokens, and read the states.

        The result is the input of the next norm.
        """
        T, shape = x_TC.shape[0], self.shape
        rows = state_step(step)
        own = self.in_proj.plan(T)
        made = reduced(self.in_proj(ops.in_form(x_TC, own.input), own))
        mixed, z = made.split([shape.channels, shape.values], 1)
        b_TH, a_TH = reduced(self.gates(x_TC)).chunk(2, 1)
        mixed = ops.causal_conv_(mixed, self.conv_weight, None, cache.conv_PCL, rows, self.kernel)
        out_THV = ops.delta_rule_(
            *(mixed, b_TH, a_TH, self.a_log, self.dt_bias),
            cache.memory_PHKV,
            rows,
            cache.recent_PNI,
            self.kernel,
            write_factor=self.write_factor,
        )
        z_THV = z.unflatten(1, (shape.value_heads, shape.value_dim))
        out_THV = ops.gated_rms_norm(out_THV, z_THV, self.norm, self.eps, self.kernel)
        output = self.out_proj.plan(T, "norm")
        return self.out_proj(ops.in_form(out_THV.flatten(1), output.input), output)
