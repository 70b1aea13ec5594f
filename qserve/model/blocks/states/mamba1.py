"""Mamba-1, a mixer with state slots instead of pages.

T: tokens of the step. C: hidden size. I: channels. N: state size of a channel.
"""

from dataclasses import dataclass
from typing import Any

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.mamba1.reference import recent_width
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import LinearPlan
from qserve.model.blocks.states.selective import SelectiveBlock
from qserve.model.blocks.states.state import StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Shape:
    """Sizes of one layer's mixer on this rank."""

    channels: int
    state: int  # state size of a channel
    rank: int  # number of inputs of dt_proj
    taps: int  # of the convolution


class Mamba1(SelectiveBlock):
    """The mixer of one layer: projections, convolution, state update and readout."""

    def __init__(
        self,
        shape: Mamba1Shape,
        *,
        conv_bias: torch.Tensor | None = None,  # [I]
        a_log: torch.Tensor,  # float32 [I, N]
        **parts: Any,  # arguments of SelectiveBlock; in_proj outputs x and z
    ) -> None:
        super().__init__(rank=shape.rank, state=shape.state, **parts)
        self.shape = shape
        self.register_buffer("conv_bias", conv_bias)
        self.register_buffer("rates", -a_log.exp().T.contiguous())  # [N, I], as states are stored

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of the layer's states. The arguments are ignored."""
        shape = self.shape
        return StateSpec(
            channels=shape.channels,
            taps=shape.taps,
            memory=(1, shape.state, shape.channels),
            dtype=self.conv_weight.dtype,
            inputs=recent_width(shape.channels, shape.state),
        )

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: StateSlots
    ) -> LinearOutput:
        """Update the requests' states with the step's tokens, and read the states.

        The result is the input of the next norm.
        """
        rows, channels = state_step(step), self.shape.channels
        x_TI, z_TI = reduced(self.in_proj(x_TC, plan)).split([channels, channels], 1)
        x_TI = ops.causal_conv_(
            x_TI, self.conv_weight, self.conv_bias, cache.conv_PCL, rows, self.kernel
        )
        dt_TI, b_TN, c_TN = self.selection(x_TI)
        out_TI = ops.channel_scan_(
            x_TI,
            dt_TI,
            b_TN,
            c_TN,
            self.rates,
            self.skip,
            cache.memory_PHKV,
            rows,
            cache.recent_PNI,
            self.kernel,
        )
        return self.gated_output(out_TI, z_TI)
