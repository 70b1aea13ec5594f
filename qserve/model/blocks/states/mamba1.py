"""Mamba-1, a mixer with state slots instead of pages.

T: tokens of the step. C: hidden size. I: channels. N: state size of a channel. R: rank of dt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.mamba1.reference import recent_width
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of
from qserve.model.blocks.states.state import StateBlock, StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat
from qserve.parallel.communicator import RankPartial


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Shape:
    """Sizes of one layer's mixer on this rank."""

    channels: int
    state: int  # state size of a channel
    rank: int  # number of inputs of dt_proj
    taps: int  # of the convolution


class Mamba1(StateBlock):
    """The mixer of one layer: projections, convolution, state update and readout."""

    def __init__(
        self,
        shape: Mamba1Shape,
        *,
        in_proj: Linear,  # outputs x and z
        x_proj: Linear,  # outputs the inputs of dt_proj, then B and C
        dt_proj: Linear,
        out_proj: Linear,
        conv_weight: torch.Tensor,  # [I, taps]
        conv_bias: torch.Tensor | None = None,  # [I]
        a_log: torch.Tensor,  # float32 [I, N]
        skip: torch.Tensor,  # float32 [I]
        dt_norm: torch.Tensor | None = None,  # [R], of dt_proj's inputs; None: no norms
        b_norm: torch.Tensor | None = None,  # [N]
        c_norm: torch.Tensor | None = None,  # [N]
        eps: float,  # of these norms
        kernel: str | None = None,  # kernel of the operations on states, selected by name
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.kernel = shape, eps, kernel
        self.in_proj, self.x_proj = in_proj, x_proj
        self.dt_proj, self.out_proj = dt_proj, out_proj
        self.register_buffer("conv_weight", conv_weight)
        self.register_buffer("conv_bias", conv_bias)
        self.register_buffer("rates", -a_log.exp().T.contiguous())  # [N, I], as states are stored
        self.register_buffer("skip", skip)
        self.register_buffer("dt_norm", dt_norm)
        self.register_buffer("b_norm", b_norm)
        self.register_buffer("c_norm", c_norm)

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        for linear in (self.in_proj, self.x_proj, self.dt_proj):
            yield from products_of(linear, None)
        yield from products_of(self.out_proj, "norm")

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
        dt_TI, b_TN, c_TN = self._controls(x_TI)
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
        out_TI = ops.gated_group_norm(out_TI, z_TI, None, 1, self.eps, False, self.kernel)
        output = self.out_proj.plan(out_TI.shape[0], "norm")
        return self.out_proj(ops.in_form(out_TI, output.input), output)

    def _controls(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dt of this rank's channels, before softplus, and B and C."""
        shape, T = self.shape, x_TI.shape[0]
        plan = self.x_proj.plan(T)
        made = self.x_proj(ops.in_form(x_TI, plan.input), plan)
        made = made.total() if isinstance(made, RankPartial) else reduced(made)
        dt_TR, b_TN, c_TN = made.split([shape.rank, shape.state, shape.state], 1)
        dt_TR = self._normed(dt_TR.contiguous(), self.dt_norm)
        b_TN, c_TN = self._normed(b_TN, self.b_norm), self._normed(c_TN, self.c_norm)
        plan = self.dt_proj.plan(T)
        return reduced(self.dt_proj(ops.in_form(dt_TR, plan.input), plan)), b_TN, c_TN

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        spec = ops.NormSpec(weight_C=weight, eps=self.eps)
        normed, _ = ops.norm(x.contiguous(), None, spec)
        return normed
