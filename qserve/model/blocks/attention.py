"""Attention over paged keys and values. Knows pages, not requests."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.attention.step import AttentionStep
from qkernels.linear.plan import LinearInput
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import Consumer, LinearOutput, reduced, split_heads
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of
from qserve.model.blocks.rotary import Rotary
from qserve.model.model_config import ModelConfig
from qserve.parallel.norm import NormOverRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(AttentionStep):
    """What attention needs to know of a step (engine/batch.py makes it)."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    state_slots_R: torch.Tensor | None = None  # int32; None: no layer has a state


class Attention(torch.nn.Module):
    """Grouped-query attention of one layer; q, k and v come from one merged matrix."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int | None,
        rotary: Rotary,
        qkv_proj: Linear,
        o_proj: Linear,
        scale: float | None = None,  # of scores; None: head_dim^-0.5
        soft_cap: float | None = None,  # of scores
        q_norm: torch.Tensor | None = None,  # of each head [D], or of all of a token's [H D]
        k_norm: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,  # float32 [H]
        query_scales: torch.Tensor | None = None,  # float32 [positions], of rotated queries
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        is_gated: bool = False,  # qkv_proj makes gates, too, of what o_proj reads
        kernel: str | None = None,  # asked for or forbidden by name
        # of queries and of keys, where a norm is over all heads and other ranks have some of them
        norms_over_ranks: tuple[NormOverRanks, NormOverRanks] | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps, self.window = config.head_dim, config.rms_norm_eps, window
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.soft_cap, self.is_gated = soft_cap, is_gated
        self.rotary = rotary
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("k_norm", k_norm)
        self.whole_norms = norms_over_ranks or (ops.rms_norm, ops.rms_norm)
        self.norms_heads = (
            q_norm is not None and q_norm.shape[0] == self.head_dim and norms_over_ranks is None
        )
        self.register_buffer("query_scales", query_scales)
        self.register_buffer("sinks", sinks)
        # float32 [], of a checkpoint calibrated for an 8-bit KV cache; other caches need none
        self.register_buffer("k_scale", k_scale)
        self.register_buffer("v_scale", v_scale)

    def products(self) -> Iterator[Product]:
        """The quantized products, and the operation that takes each one's result."""
        yield from products_of(self.qkv_proj, self._qkv_consumer)
        yield from products_of(self.o_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Of the first linear: what the norm before this block should make."""
        return self.qkv_proj.plan(rows, self._qkv_consumer)

    @property
    def _qkv_consumer(self) -> Consumer | None:
        """The rotation adds split-K sums; a norm over all heads does not."""
        return None if self._norms_whole else "rope"

    @property
    def _norms_whole(self) -> bool:
        return self.q_norm is not None and not self.norms_heads

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: PagedKv
    ) -> LinearOutput:
        """Attend from the step's tokens [T, C] to all of their requests'; writes their keys.

        The result is for the norm that follows.
        """
        gates = (self.num_heads,) if self.is_gated else ()
        heads = (self.num_heads, *gates, self.num_kv_heads, self.num_kv_heads)
        q, *gate, k, v = split_heads(self.qkv_proj(x_TC, plan), heads, self.head_dim)
        if self._norms_whole:
            norm_q, norm_k = self.whole_norms
            q = norm_q(q.flatten(1), self.q_norm, self.eps).view_as(q)
            k = norm_k(k.flatten(1), self.k_norm, self.eps).view_as(k)
        q = ops.rope_write_kv_(
            q,
            k,
            v,
            self.rotary.cos_sin,
            step.positions_T,
            cache,
            step.slots_T,
            q_norm_D=self.q_norm if self.norms_heads else None,
            k_norm_D=self.k_norm if self.norms_heads else None,
            eps=self.eps,
            interleaved=self.rotary.interleaved,
            query_scales=self.query_scales,
            inputs_ready=True,  # a step's inputs are there before its embedding begins
        )
        output = self.o_proj.plan(q.shape[0], "norm")
        writes_limbs = isinstance(output.input, LimbForm) and not gate
        limbs = output.input if writes_limbs else None
        out = ops.paged_attention(
            q,
            cache,
            step,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks_H=self.sinks,
            limbs=limbs,
            inputs_ready=True,
            kernel=self.kernel,
        )
        if gate:
            out = out * torch.sigmoid(reduced(gate[0]))
            return self.o_proj(ops.in_form(out.flatten(1), output.input), output)
        return self.o_proj(out.flatten(1) if limbs is None else out, output)
