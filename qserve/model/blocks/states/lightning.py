"""Lightning attention (MiniMax-01, arXiv 2501.08313), a mixer with state slots.

The state of each head decays by the same factor at every token:

    S = exp(-slope) S + k v^T        o = S^T q

This is the recurrence of Mamba-2 with a step size (dt) of 1, where B are keys, C queries and x
values.

In Ling, queries and keys are normed and rotated first.

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
from qserve.model.blocks.rotary import Rotary
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
        eps: float = NORM_EPS,  # of all norms
        norm_groups: int = 1,  # groups of heads that `norm` norms apart
        is_activated: bool = True,  # queries, keys and values go through SiLU
        q_norm: torch.Tensor | None = None,  # [D]
        k_norm: torch.Tensor | None = None,  # [D]
        rotary: Rotary | None = None,  # None: queries and keys are not rotated
        query_scale: float = 1.0,
        norm_over_ranks: NormOverRanks | None = None,  # None: this rank has all heads
        kernel: str | None = None,  # kernel of the operations on states, selected by name
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.kernel = heads, head_dim, kernel
        self.eps, self.norm_groups, self.is_activated = eps, norm_groups, is_activated
        self.query_scale, self.rotary = query_scale, rotary
        self.in_proj, self.out_proj = in_proj, out_proj
        self.norm_over_ranks = norm_over_ranks
        self.register_buffer("a_log", slopes.log())
        self.register_buffer("skip", torch.zeros_like(slopes))
        self.register_buffer("dt_bias", torch.full_like(slopes, STEP_BIAS))
        self.register_buffer("norm", norm)
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("k_norm", k_norm)

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
        if self.is_activated:
            mixed = silu(mixed)
        if self.rotary is not None:
            mixed = self._turned(mixed, step.positions_T)
        out_THD = ops.selective_scan_(
            mixed,
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
        out_TI = self._normed(out_THD.flatten(1))
        out_TI = torch.sigmoid(gate_TI) * out_TI
        output = self.out_proj.plan(made.shape[0], "norm")
        return self.out_proj(ops.in_form(out_TI, output.input), output)

    def _normed(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the norm of the result, over all heads or in each group of heads."""
        spec = ops.NormSpec(weight_C=self.norm, eps=self.eps)
        if self.norm_over_ranks is not None:
            return self.norm_over_ranks(x_TI, spec)
        if self.norm_groups == 1:
            return ops.norm(x_TI, None, spec)[0]
        groups = x_TI.reshape(len(x_TI) * self.norm_groups, -1)
        plain = ops.NormSpec(weight_C=torch.ones_like(self.norm[: groups.shape[1]]), eps=self.eps)
        return ops.norm(groups, None, plain)[0].view_as(x_TI) * self.norm

    def _turned(self, mixed: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return values, keys and queries [T, 3 I] with keys and queries normed and rotated."""
        v_TI, k_TI, q_TI = mixed.chunk(3, 1)
        cos_sin_T1R = self.rotary.cos_sin[positions_T][:, None]
        k_TI, q_TI = (
            self._turned_heads(x_TI, norm_D, cos_sin_T1R)
            for x_TI, norm_D in ((k_TI, self.k_norm), (q_TI, self.q_norm))
        )
        return torch.cat([v_TI, k_TI, q_TI * self.query_scale], 1)

    def _turned_heads(
        self, x_TI: torch.Tensor, norm_D: torch.Tensor | None, cos_sin_T1R: torch.Tensor
    ) -> torch.Tensor:
        x = x_TI.reshape(-1, self.head_dim)
        if norm_D is not None:
            x = ops.norm(x, None, ops.NormSpec(weight_C=norm_D, eps=self.eps))[0]
        x_THD, width = x.view(len(x_TI), self.heads, self.head_dim), cos_sin_T1R.shape[-1]
        if not width:
            return x_THD.flatten(1)
        first, second = x_THD[..., :width].float().chunk(2, -1)
        cos, sin = cos_sin_T1R.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned.to(x.dtype), x_THD[..., width:]], -1).flatten(1)
