"""PLaMo 2's form of Mamba-2: dt, B and C are computed after the convolution, as in Mamba-1.

All heads share B and C. T: tokens of the step. C: hidden size. I: channels. N: state size.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.mamba2.reference import recent_width
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import LinearPlan
from qserve.model.blocks.states.selective import SelectiveBlock
from qserve.model.blocks.states.state import StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat

ANY_STEP = (0.0, math.inf)  # limits of dt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlamoMambaShape:
    """Sizes of one layer's mixer on this rank."""

    heads: int
    head_dim: int
    state: int  # state size per channel of a head
    rank: int  # number of inputs of dt_proj
    taps: int  # of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


class PlamoMamba(SelectiveBlock):
    """The mixer of one layer: projections, convolution, state update and readout."""

    def __init__(
        self,
        shape: PlamoMambaShape,
        *,
        a_log: torch.Tensor,  # float32 [heads]
        dt_bias: torch.Tensor,  # float32 [heads]
        **parts: Any,  # arguments of SelectiveBlock; in_proj outputs z of all heads, then x
    ) -> None:
        super().__init__(rank=shape.rank, state=shape.state, dt_last=True, **parts)
        self.shape = shape
        self.register_buffer("a_log", a_log)
        self.register_buffer("dt_bias", dt_bias)

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of the layer's states. The arguments are ignored."""
        shape = self.shape
        return StateSpec(
            channels=shape.inner,
            taps=shape.taps,
            memory=(shape.heads, shape.state, shape.head_dim),
            dtype=self.conv_weight.dtype,
            inputs=recent_width(shape.inner, shape.state, shape.heads),
        )

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: StateSlots
    ) -> LinearOutput:
        """Update the requests' states with the step's tokens, and read the states.

        The result is the input of the next norm.
        """
        rows, inner = state_step(step), self.shape.inner
        z_TI, x_TI = reduced(self.in_proj(x_TC, plan)).split([inner, inner], 1)
        x_TI = ops.causal_conv_(x_TI, self.conv_weight, None, cache.conv_PCL, rows, self.kernel)
        dt_TH, b_TN, c_TN = self.selection(x_TI)
        out_THD = ops.selective_scan_(
            torch.cat([x_TI, b_TN, c_TN], 1),
            dt_TH,
            self.a_log,
            self.skip,
            self.dt_bias,
            cache.memory_PHKV,
            ANY_STEP,
            rows,
            cache.recent_PNI,
            self.kernel,
        )
        return self.gated_output(out_THD.flatten(1), z_TI)
