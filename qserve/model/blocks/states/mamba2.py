"""Mamba-2, a mixer with state slots instead of pages.

T: tokens of the step. C: hidden size. I: channels of x and of the result.
"""

from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.mamba2.reference import recent_width
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import Linear, LinearPlan
from qserve.model.blocks.states.state import StateBlock, StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat
from qserve.parallel.norm import GroupNormOverRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    """Sizes of one layer's mixer, and the range of its step sizes (dt)."""

    heads: int
    head_dim: int
    groups: int  # number of groups of heads that share B and C
    state: int  # state size per channel of a head
    taps: int  # of the convolution
    step_limits: tuple[float, float]  # lower and upper limit of dt

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


class Mamba2(StateBlock):
    """The mixer of one layer: projections, convolution, state update and readout."""

    def __init__(
        self,
        shape: MambaShape,
        *,
        in_proj: Linear,  # outputs z, x, B, C, and dt of each head
        out_proj: Linear,
        conv_weight: torch.Tensor,  # [channels, taps]
        conv_bias: torch.Tensor | None = None,  # [channels]
        a_log: torch.Tensor,  # float32 [heads]
        skip: torch.Tensor,  # float32 [heads]
        dt_bias: torch.Tensor,  # float32 [heads]
        norm: torch.Tensor | None = None,  # [I]; None: the result is only multiplied by silu(z)
        norm_first: bool = False,  # True: the norm comes before that product
        factors: torch.Tensor | None = None,  # multiply the outputs of in_proj; None: all are 1
        norm_over_ranks: GroupNormOverRanks | None = None,  # None: this rank has whole groups
        eps: float,
        kernel: str | None = None,  # kernel of the operations on states, selected by name
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.shape, self.eps, self.norm_first = shape, eps, norm_first
        self.in_proj, self.out_proj = in_proj, out_proj
        self.norm_over_ranks = norm_over_ranks
        self.register_buffer("conv_weight", conv_weight)
        self.register_buffer("conv_bias", conv_bias)
        self.register_buffer("a_log", a_log)
        self.register_buffer("skip", skip)
        self.register_buffer("dt_bias", dt_bias)
        self.register_buffer("norm", norm)
        self.register_buffer("factors", factors)

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of the layer's states. The arguments are ignored."""
        shape = self.shape
        return StateSpec(
            channels=shape.channels,
            taps=shape.taps,
            memory=(shape.heads, shape.state, shape.head_dim),
            dtype=self.conv_weight.dtype,
            inputs=recent_width(shape.inner, shape.groups * shape.state, shape.heads),
        )

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: StateSlots
    ) -> LinearOutput:
        """Update the requests' states with the step's tokens, and read the states.

        The result is the input of the next norm.
        """
        shape, rows = self.shape, state_step(step)
        made = reduced(self.in_proj(x_TC, plan))
        if self.factors is not None:
            made = made * self.factors
        z_TI, mixed, dt_TH = made.split([shape.inner, shape.channels, shape.heads], 1)
        mixed = ops.causal_conv_(
            mixed, self.conv_weight, self.conv_bias, cache.conv_PCL, rows, self.kernel
        )
        out_THD = ops.selective_scan_(
            mixed,
            dt_TH,
            self.a_log,
            self.skip,
            self.dt_bias,
            cache.memory_PHKV,
            shape.step_limits,
            rows,
            cache.recent_PNI,
            self.kernel,
        )
        out_TI = self._normed(out_THD.flatten(1), z_TI)
        output = self.out_proj.plan(out_TI.shape[0], "norm")
        return self.out_proj(ops.in_form(out_TI, output.input), output)

    def _normed(self, x_TI: torch.Tensor, z_TI: torch.Tensor) -> torch.Tensor:
        """Return x * silu(z) with the norm per group, before or after the product."""
        over_ranks, settings = self.norm_over_ranks, (self.eps, self.norm_first)
        if over_ranks is not None and self.norm is not None:
            return over_ranks(x_TI, z_TI, self.norm, *settings)
        groups = self.shape.groups
        return ops.gated_group_norm(x_TI, z_TI, self.norm, groups, *settings, self.kernel)
