"""Lightning attention (MiniMax-01, arXiv 2501.08313), a mixer with state slots.

The state of each head decays by the same factor at every token:

    S = exp(-slope) S + k v^T        o = S^T q

This is the recurrence of Mamba-2 with a step size (dt) of 1, where B are keys, C queries and x
values.

T: tokens of the step. C: hidden size. H: heads. D: head dim. I: H * D.
"""

import math

import torch
from torch.nn.functional import silu

from qkernels import ops
from qkernels.causal_conv.state import StateSlots
from qkernels.mamba2.reference import recent_width
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.linear import Linear, LinearPlan
from qserve.model.blocks.states.state import StateBlock, StateSpec, state_step
from qserve.model.cache_spec import CacheSpec, KvFormat
from qserve.parallel.norm import NormOverRanks

NORM_EPS = 1e-6  # transformers' default; rms_norm_eps is ignored
STEP_BIAS = math.log(math.e - 1)  # softplus of it is 1


class LightningAttention(StateBlock):
    """The mixer of one layer: projections, state update and readout."""

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        in_proj: Linear,  # outputs values, keys, queries, and gates for the result
        out_proj: Linear,
        slopes: torch.Tensor,  # float32 [H]
        norm: torch.Tensor,  # [I]
        norm_over_ranks: NormOverRanks | None = None,  # None: this rank has all heads
        kernel: str | None = None,  # kernel of the operations on states, selected by name
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.kernel = heads, head_dim, kernel
        self.in_proj, self.out_proj = in_proj, out_proj
        self.norm_over_ranks = norm_over_ranks
        self.register_buffer("a_log", slopes.log())
        self.register_buffer("skip", torch.zeros_like(slopes))
        self.register_buffer("dt_bias", torch.full_like(slopes, STEP_BIAS))
        self.register_buffer("norm", norm)

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the spec of the layer's states. The arguments are ignored."""
        inner = self.heads * self.head_dim
        return StateSpec(
            channels=0,
            taps=1,
            memory=(self.heads, self.head_dim, self.head_dim),
            dtype=self.norm.dtype,
            inputs=recent_width(inner, inner, self.heads),
        )

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: StateSlots
    ) -> LinearOutput:
        """Update the requests' states with the step's tokens, and read the states.

        The result is the input of the next norm.
        """
        made = reduced(self.in_proj(x_TC, plan))
        inner = self.heads * self.head_dim
        mixed, gate_TI = made.split([3 * inner, inner], 1)
        out_THD = ops.selective_scan_(
            silu(mixed),
            made.new_zeros(made.shape[0], self.heads),
            self.a_log,
            self.skip,
            self.dt_bias,
            cache.memory_PHKV,
            (0.0, math.inf),
            state_step(step),
            cache.recent_PNI,
            self.kernel,
        )
        spec = ops.NormSpec(weight_C=self.norm, eps=NORM_EPS)
        out_TI = out_THD.flatten(1)
        if self.norm_over_ranks is None:
            out_TI, _ = ops.norm(out_TI, None, spec)
        else:
            out_TI = self.norm_over_ranks(out_TI, spec)
        out_TI = torch.sigmoid(gate_TI) * out_TI
        output = self.out_proj.plan(made.shape[0], "norm")
        return self.out_proj(ops.in_form(out_TI, output.input), output)
