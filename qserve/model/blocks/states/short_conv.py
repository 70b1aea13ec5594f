"""Short convolution of LFM2, a mixer with state slots instead of pages.

T: tokens of the step. C: hidden size.
"""

import torch

from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import Linear, LinearPlan
from qserve.model.blocks.states.state import StateBlock, StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat


class ShortConv(StateBlock):
    """out_proj(c * convolution(b * x)), where b, c, x = in_proj(input)."""

    def __init__(
        self,
        *,
        in_proj: Linear,  # outputs b, c and x
        out_proj: Linear,
        conv_weight: torch.Tensor,  # [C, taps]
        conv_bias: torch.Tensor | None = None,  # [C]
        kernel: str | None = None,  # kernel of the convolution, selected by name
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.in_proj, self.out_proj = in_proj, out_proj
        self.register_buffer("conv_weight", conv_weight)
        self.register_buffer("conv_bias", conv_bias)

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of the layer's states. The arguments are ignored."""
        channels, taps = self.conv_weight.shape
        return StateSpec(channels=channels, taps=taps, memory=None, dtype=self.conv_weight.dtype)

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: StateSlots
    ) -> LinearOutput:
        """Convolve the step's tokens with earlier ones; store the last products b * x as the state.

        The result is the input of the next norm.
        """
        mixed_TC = reduced(self.in_proj(x_TC, plan))
        out_TC = ops.short_conv_(
            mixed_TC,
            self.conv_weight,
            self.conv_bias,
            cache.conv_PCL,
            state_step(step),
            self.kernel,
        )
        output = self.out_proj.plan(out_TC.shape[0], "norm")
        return self.out_proj(ops.in_form(out_TC, output.input), output)
