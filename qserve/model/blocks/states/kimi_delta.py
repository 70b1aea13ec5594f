"""Kimi Delta Attention, a mixer with state slots ("Kimi Linear", arXiv 2510.26692).

It is a gated delta net with a separate decay for each key channel.

T: tokens of the step. C: hidden size. H: heads. V: head dim. I: H * V.
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
from qserve.model.blocks.linear import (
    FLOAT_PLAN,
    FloatLinear,
    Linear,
    LinearPlan,
    Product,
    products_of,
)
from qserve.model.blocks.states.state import StateBlock, StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiShape:
    """Sizes of one layer's mixer."""

    heads: int
    head_dim: int  # of queries, keys and values
    taps: int  # of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


class KimiDelta(StateBlock):
    """The mixer of one layer: projections, convolution, state update and readout."""

    def __init__(
        self,
        shape: KimiShape,
        *,
        in_proj: Linear,  # outputs queries, keys and values; without g_b also gates for the result
        # outputs the inputs of f_b and g_b, and b of each head; without f_b and g_b decays and b
        low: Linear,
        f_b: FloatLinear | None,  # outputs decays of key channels
        g_b: FloatLinear | None,  # outputs gates for the result
        out_proj: Linear,
        conv_weight: torch.Tensor,  # [3 I, taps]
        a_log: torch.Tensor,  # float32 [H]
        dt_bias: torch.Tensor,  # float32 [I]
        norm: torch.Tensor,  # [V]
        eps: float,
        decay_bound: float = 0.0,  # below 0: bound of the logarithm of decays
        kernel: str | None = None,  # kernel of the operations on states, selected by name
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.shape, self.eps, self.decay_bound = shape, eps, decay_bound
        self.in_proj, self.low, self.f_b, self.g_b = in_proj, low, f_b, g_b
        self.out_proj = out_proj
        self.register_buffer("conv_weight", conv_weight)
        self.register_buffer("a_log", a_log)
        self.register_buffer("dt_bias", dt_bias)
        self.register_buffer("norm", norm)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.low, None)
        yield from super().products()

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, because `low` reads the same norm."""
        return FLOAT_PLAN

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of the layer's states. The arguments are ignored."""
        shape = self.shape
        return StateSpec(
            channels=3 * shape.inner,
            taps=shape.taps,
            memory=(shape.heads, shape.head_dim, shape.head_dim),
            dtype=self.conv_weight.dtype,
            inputs=recent_width(shape.inner, shape.inner, shape.heads, shape.inner),
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
        made, low = (
            reduced(self.in_proj(ops.in_form(x_TC, own.input), own)),
            reduced(self.low(x_TC)),
        )
        mixed, decays_TI, z, b_TH = self._parts(made, low)
        mixed = ops.causal_conv_(mixed, self.conv_weight, None, cache.conv_PCL, rows, self.kernel)
        out_THV = ops.delta_rule_(
            *(mixed, b_TH, decays_TI, self.a_log, self.dt_bias),
            cache.memory_PHKV,
            rows,
            cache.recent_PNI,
            self.kernel,
            decay_bound=self.decay_bound,
        )
        z_THV = z.unflatten(1, (shape.heads, shape.head_dim))
        out_THV = ops.gated_rms_norm(out_THV, z_THV, self.norm, self.eps, self.kernel, sigmoid=True)
        output = self.out_proj.plan(T, "norm")
        return self.out_proj(ops.in_form(out_THV.flatten(1), output.input), output)

    def _parts(self, made: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries with keys and values, decays, gates for the result, and b."""
        shape = self.shape
        if self.f_b is None or self.g_b is None:
            mixed, z_TI = made.split([3 * shape.inner, shape.inner], 1)
            decays_TI, b_TH = low.split([shape.inner, shape.heads], 1)
            return mixed, decays_TI, z_TI, b_TH
        widths = [shape.head_dim, shape.head_dim, shape.heads]
        decays_TV, gates_TV, b_TH = low.split(widths, 1)
        return made, self.f_b(decays_TV), self.g_b(gates_TV), b_TH
