"""Attention over paged keys and values, and the spec of its cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from formats.architecture.columns import ATTENTION
from formats.errors import CheckpointError, InputError
from qkernels import ops
from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.checks import refuses_4bit_heads
from qkernels.choice import FIXED_ORDER
from qkernels.gpu.device import lacks_arch, sm_count
from qkernels.latent.expanded import ExpandedChunks
from qkernels.operands.forms import LinearInput
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import Consumer, LinearOutput, reduced, split_heads
from qkernels.operations import explain
from qkernels.warm_up import decode_boundaries, prefill_boundaries
from qserve.model.axis_ropes import RowRopes
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of
from qserve.model.blocks.rotary import Rotary
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat, StepLimits, WarmUpShape
from qserve.model.model_config import ModelConfig
from qserve.parallel.kv_exchange import KvExchange
from qserve.parallel.norm import NormOverRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEmbeds:
    """Embeddings that replace the token embeddings of some rows. M: number of these rows."""

    rows_M: torch.Tensor | None  # int64: indices into T; None: all rows, including text rows
    values_MC: torch.Tensor
    # values to add to the residual stream of these rows after each of the first layers (deepstack)
    added_MC: tuple[torch.Tensor, ...] = ()

    def added_to(self, residual_TC: torch.Tensor, level: int) -> torch.Tensor:
        """Return the residual stream with the values of one level added."""
        if self.rows_M is None:
            return residual_TC + self.added_MC[level]
        return residual_TC.index_add(0, self.rows_M, self.added_MC[level])

    def fill_levels_(self, levels: Iterable[torch.Tensor]) -> None:
        """Write the values of each level to a tensor of zeros [T, C]."""
        for level_TC, added_MC in zip(levels, self.added_MC, strict=True):
            level_TC[self.rows_M] = added_MC

    def part(self, embeds: slice, first: int) -> "InputEmbeds":
        """Return a range of the embeddings, for a microbatch that begins at row `first`."""
        assert self.rows_M is not None
        return InputEmbeds(
            rows_M=self.rows_M[embeds] - first,
            values_MC=self.values_MC[embeds],
            added_MC=tuple(added_MC[embeds] for added_MC in self.added_MC),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """A step for latent attention, split into requests with many rows and the others."""

    expanded: tuple[ExpandedChunks, ...]  # requests with many rows
    others: AttentionStep | None  # None: no other requests
    other_rows: slice | torch.Tensor  # rows of the other requests, indices into T


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(AttentionStep):
    """Tensors of a step that token mixers read. engine/step/device_step.py makes them."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    token_ids_T: torch.Tensor | None = None  # set for decoders whose layers read it
    state_slots_R: torch.Tensor | None = None  # int32; None: no layer has a recurrent state
    # int32: number of rows before the step that the states do not include yet; None: 0
    lacking_R: torch.Tensor | None = None
    embeds: InputEmbeds | None = None  # None: all rows use their token's embedding
    # number of levels that the first layers add (InputEmbeds.added_MC), for pipeline stages
    num_levels: int = 0
    sees_ahead_in_windows: bool = False  # True: last_keys_T counts only in layers with a window
    # bool [T]: rows that see keys before the window, too; None: no such rows
    unlimited_T: torch.Tensor | None = None
    # bool [T]: tokens of images and videos, in models that have other experts for them (ERNIE);
    # None: no such tokens
    is_media_T: torch.Tensor | None = None
    row_ropes: RowRopes | None = None  # None: positions have one axis
    rope_positions_T: torch.Tensor | None = None  # rotary positions; None: positions_T
    split: SplitStep | None = None  # None: not split, since chunks are too short (SplitRule)
    layer_input_TP: torch.Tensor | None = None  # input of the layer that runs (LayerInputs)
    # Number of rows that attend to the same keys, computed as more heads of one attention row. Of
    # the folded_rows * R rows, row b * R + r belongs to request r.
    folded_rows: int = 1
    exchange: KvExchange | None = None  # None: each rank computes all tokens
    # called with a layer's cache after the step's keys are written to it
    on_written: Callable[[Cache], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKvSpec(CacheSpec):
    """Cache spec: keys and values of each token, for each KV head."""

    kv_format: KvFormat
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    has_soft_cap: bool
    has_sinks: bool
    has_slopes: bool = False
    chunk_size: int | None = None
    kernel: str | None  # selected or excluded by name
    scales: tuple[torch.Tensor, torch.Tensor] | None = field(compare=False)  # static k and v scales

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> PagedKv:
        shape = num_pages, self.page_size, self.num_kv_heads, self.head_dim
        return PagedKv.zeros(shape, self.kv_format.dtype, device, self.scales)

    @property
    def heads_axis(self) -> int:
        return 1

    @property
    def divides_decodes(self) -> bool:
        return self.kernel != FIXED_ORDER

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        check_capturable(
            "paged_attention",
            f"attention over pages of {self.page_size} tokens, heads of {self.head_dim}",
            "give --block-size 16, or --enforce-eager to run it slowly",
            device=device,
            dtype=dtype,
            requested=self.kernel,
            head_dim=self.head_dim,
            page_size=self.page_size,
            pages_dtype=self.kv_format.dtype,
            soft_cap=self.has_soft_cap,
            sinks=self.has_sinks,
            alibi=self.has_slopes,
            chunked=self.chunk_size is not None,
        )

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        page_element_size = self.kv_format.dtype.itemsize
        sizes = {
            "num_kv_heads": self.num_kv_heads,
            "heads_per_kv_head": self.num_heads // self.num_kv_heads,
            "max_tokens": limits.max_tokens,
            "max_context_len": limits.max_model_len,
            "window": self.window or self.chunk_size,
            "sm_count": sm_count(device),
        }
        for tokens, keys in prefill_boundaries(**sizes):
            yield 1, tokens, keys
        yield from decode_boundaries(
            max_requests=limits.max_num_seqs,
            page_size=self.page_size,
            head_dim=self.head_dim,
            element_size=dtype.itemsize,
            page_element_size=page_element_size,
            gluon=page_element_size < dtype.itemsize and lacks_arch(device, "sm_90") is None,
            **sizes,
        )


def check_capturable(operation: str, subject: str, remedy: str, **facts: Any) -> None:
    """Raise InputError if only plain torch supports an operation: CUDA graphs cannot capture it.

    `facts`: arguments for `explain`.
    """
    choices = explain(operation, **facts)
    if not any(each.taken for each in choices if each.name != "reference"):
        portable = next(each for each in choices if each.name == "triton")
        raise InputError(
            subject,
            "only plain torch supports it, which CUDA graphs cannot capture: triton"
            f" {portable.reason}",
            remedy,
        )


def announce_written(step: StepInputs, cache: Cache) -> None:
    """Exchange a cache with other ranks, and report that the step's tokens are written to it."""
    if step.exchange is not None:
        step.exchange.exchange_(cache)
    if step.on_written is not None:
        step.on_written(cache)


def _whole_norm(x_TN: torch.Tensor, spec: ops.NormSpec) -> torch.Tensor:
    return ops.norm(x_TN, None, spec)[0]


class Attention(torch.nn.Module):
    """Grouped-query attention of one layer. One merged matrix computes q, k and v."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int | None,
        rotary: Rotary,
        qkv_proj: Linear,
        o_proj: Linear,
        scale: float | None = None,  # of attention scores; None: head_dim^-0.5
        soft_cap: float | None = None,  # of attention scores
        # [D]: norm per head; [H, D]: each head has its own weights; [H D]: norm over all heads
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,  # float32 [H]
        slopes: torch.Tensor | None = None,  # float32 [H], for ALiBi
        chunk_size: int | None = None,  # rows attend only to keys in their chunk of positions
        query_scales: torch.Tensor | None = None,  # float32 [positions], for queries after rope
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        v_norm: torch.Tensor | None = None,  # [D]: norm of each head's values
        keys_are_values: bool = False,  # True: values are the keys before norm and rope
        rotates_first: bool = False,  # True: norms per head come after rope
        is_gated: bool = False,  # True: qkv_proj also produces gates for the input of o_proj
        kernel: str | None = None,  # selected or excluded by name
        # norms of queries and keys, if a norm covers all heads and the heads are sharded
        norms_over_ranks: tuple[NormOverRanks, NormOverRanks] | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps, self.window = config.head_dim, config.norm_eps, window
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.soft_cap, self.is_gated = soft_cap, is_gated
        self.rotary, self.rotates_first = rotary, rotates_first
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("k_norm", k_norm)
        self.register_buffer("v_norm", v_norm)
        self.keys_are_values = keys_are_values
        self.whole_norms = norms_over_ranks or (_whole_norm, _whole_norm)
        self.norms_heads = (
            q_norm is not None and q_norm.shape == (self.head_dim,) and norms_over_ranks is None
        )
        own = q_norm is not None and q_norm.ndim == 2
        self.register_buffer("plain_norm", torch.ones_like(q_norm[0]) if own else None)
        self.register_buffer("query_scales", query_scales)
        self.register_buffer("sinks", sinks)
        self.register_buffer("slopes", slopes)
        self.chunk_size = chunk_size
        # float32 [], from a checkpoint calibrated for an 8-bit KV cache; otherwise unused
        self.register_buffer("k_scale", k_scale)
        self.register_buffer("v_scale", v_scale)

    @property
    def has_kv_scales(self) -> bool:
        """True if the checkpoint has the scales of an 8-bit KV cache."""
        return self.k_scale is not None and self.v_scale is not None

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> PagedKvSpec:
        """Return the spec of the layer's pages.

        Raises CheckpointError if static scales are neither a single one nor one per KV head, and
        InputError if 4-bit pages do not support the head size.
        """
        kv_format.refuse_int4(refuses_4bit_heads(self.head_dim))
        scales = (self.k_scale, self.v_scale) if kv_format.static_scales else None
        for scale in scales or ():
            if scale.numel() not in (1, self.num_kv_heads):
                raise CheckpointError(
                    f"{ATTENTION}.k_scale",
                    f"expected one scale, or one for each of {self.num_kv_heads} KV heads, found"
                    f" {scale.numel()}",
                    "calibrate again",
                )
        return PagedKvSpec(
            kv_format=kv_format,
            page_size=page_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            has_soft_cap=self.soft_cap is not None,
            has_sinks=self.sinks is not None,
            has_slopes=self.slopes is not None,
            chunk_size=self.chunk_size,
            kernel=self.kernel,
            scales=scales,
        )

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.qkv_proj, self._qkv_consumer)
        yield from products_of(self.o_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear, which sets the output form of the norm before it."""
        return self.qkv_proj.plan(rows, self._qkv_consumer)

    @property
    def _qkv_consumer(self) -> Consumer | None:
        """The operation that sums split-K partials of qkv_proj; None: qkv_proj sums them itself.

        Rope sums them, unless a norm over all heads precedes it or a norm per head follows it.
        """
        reads_tensors = self._norms_whole or self.rotates_first or self.v_norm is not None
        return None if reads_tensors else "rope"

    @property
    def _norms_whole(self) -> bool:
        return self.q_norm is not None and not self.norms_heads

    def _with_values(self, parts: Sequence[LinearOutput]) -> Sequence[LinearOutput]:
        """Return queries, gates, keys and values. Values are normed if the layer has v_norm."""
        parts = [*parts, parts[-1]] if self.keys_are_values else parts
        if self.v_norm is None:
            return parts
        *others, v = parts
        spec = ops.NormSpec(weight_C=self.v_norm, eps=self.eps)
        normed, _ = ops.norm(reduced(v).reshape(-1, self.head_dim), None, spec)
        return [*others, normed.view(-1, self.num_kv_heads, self.head_dim)]

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: PagedKv
    ) -> LinearOutput:
        """Store the keys of the step's tokens [T, C], and attend to all tokens of their requests.

        The result is the input of the next norm.
        """
        q, gate = self._written(x_TC, plan, step, cache)
        announce_written(step, cache)
        return self._attended(q, gate, step, cache)

    def _written(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: PagedKv
    ) -> tuple[torch.Tensor, LinearOutput | None]:
        """Store keys and values. Return queries after rope, and gates if the layer has some."""
        q, *gate, k, v = self._parts(x_TC, plan)
        if self.plain_norm is not None:
            q, k = (self._normed_heads(*each) for each in ((q, self.q_norm), (k, self.k_norm)))
        elif self._norms_whole:
            norm_q, norm_k = self.whole_norms
            of_q, of_k = (
                ops.NormSpec(weight_C=weight, eps=self.eps) for weight in (self.q_norm, self.k_norm)
            )
            q = norm_q(q.flatten(1), of_q).view_as(q)
            k = norm_k(k.flatten(1), of_k).view_as(k)
        cos_sin, positions_T = self.rotary.cos_sin, step.rope_positions_T
        positions_T = step.positions_T if positions_T is None else positions_T
        if step.row_ropes is not None:
            cos_sin, positions_T = step.row_ropes.tables[self.rotary], step.row_ropes.rows_T
        if self.rotates_first:
            q, k = self._rotated(q, k, cos_sin, positions_T)
            cos_sin = cos_sin[:, :0]  # the operation below only norms and writes, without rope
        q = ops.rope_write_kv_(
            q,
            k,
            v,
            cos_sin,
            positions_T,
            cache,
            step.slots_T,
            q_norm_D=self.q_norm if self.norms_heads else None,
            k_norm_D=self.k_norm if self.norms_heads else None,
            eps=self.eps,
            interleaved=self.rotary.interleaved,
            query_scales=self.query_scales,
            inputs_ready=True,  # a step's inputs are complete before its embedding starts
        )
        return q, gate[0] if gate else None

    def _normed_heads(self, x_THD: torch.Tensor, weight_HD: torch.Tensor) -> torch.Tensor:
        """Norm each head, then multiply it by its own weights."""
        spec = ops.NormSpec(weight_C=self.plain_norm, eps=self.eps)
        normed, _ = ops.norm(x_THD.reshape(-1, self.head_dim), None, spec)
        return normed.view_as(x_THD) * weight_HD

    def _rotated(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated queries and keys. With two tables each one rotates a half of a head."""
        width = self.rotary.cos_sin.shape[1]
        found = [
            ops.apply_rope(q, k, table.contiguous(), positions_T, self.rotary.interleaved)
            for table in cos_sin.split(width, 1)
        ]
        if len(found) == 1:
            return found[0]
        first, second = (
            torch.cat([low[..., : width // 2], high[..., width // 2 :]], -1)
            for low, high in zip(*found, strict=True)
        )
        return first, second

    def _parts(self, x_TC: LinearInput, plan: LinearPlan) -> Sequence[LinearOutput]:
        """Return queries, gates (if is_gated), keys and values, each [T, heads, D]."""
        gates = (self.num_heads,) if self.is_gated else ()
        heads = (self.num_heads, *gates, self.num_kv_heads)
        heads = heads if self.keys_are_values else (*heads, self.num_kv_heads)
        parts = split_heads(self.qkv_proj(x_TC, plan), heads, self.head_dim)
        return self._with_values(parts)

    def _attended(
        self, q: torch.Tensor, gate: LinearOutput | None, step: StepInputs, cache: PagedKv
    ) -> LinearOutput:
        """Return o_proj of the attention of `q`, queries after rope, over the cache."""
        output, fold = self.o_proj.plan(q.shape[0], "norm"), step.folded_rows
        takes_limbs = isinstance(output.input, LimbForm)
        writes_limbs = takes_limbs and gate is None and fold == 1 and step.unlimited_T is None
        if fold > 1:
            assert self.sinks is None and self.slopes is None
            q = fold_rows(q, self.num_kv_heads, fold)
        limbs = output.input if writes_limbs else None
        out = self._scored(q, step, cache, limbs)
        if fold > 1:
            out = unfold_rows(out, self.num_kv_heads, fold)
        if gate is not None:
            out = out * torch.sigmoid(reduced(gate))
        if takes_limbs and not writes_limbs or gate is not None:
            return self.o_proj(ops.in_form(out.flatten(1), output.input), output)
        return self.o_proj(out.flatten(1) if limbs is None else out, output)

    def _scored(
        self, q: torch.Tensor, step: StepInputs, cache: PagedKv, limbs: LimbForm | None
    ) -> Any:
        """Return the attention output [T, H, D], or its limbs."""
        if step.sees_ahead_in_windows and self.window is None:
            step = replace(step, last_keys_T=None)

        def attention(window: int | None) -> Any:
            return ops.paged_attention(
                q,
                cache,
                step,
                scale=self.scale,
                window=window,
                soft_cap=self.soft_cap,
                sinks_H=self.sinks,
                slopes_H=self.slopes,
                chunk_size=self.chunk_size,
                limbs=limbs,
                inputs_ready=True,
                kernel=self.kernel,
            )

        found, unlimited_T = attention(self.window), step.unlimited_T
        if unlimited_T is None or self.window is None or step.max_context_len <= self.window:
            return found
        return torch.where(unlimited_T[:, None, None], attention(None), found)


def fold_rows(q_THD: torch.Tensor, num_kv_heads: int, fold: int) -> torch.Tensor:
    """Return queries of `fold` rows per request as heads of one row, [T / fold, fold * H, D]."""
    _, heads, head_dim = q_THD.shape
    requests = len(q_THD) // fold
    q = q_THD.view(fold, requests, num_kv_heads, heads // num_kv_heads, head_dim)
    return q.permute(1, 2, 0, 3, 4).reshape(requests, fold * heads, head_dim)


def unfold_rows(out_RHD: torch.Tensor, num_kv_heads: int, fold: int) -> torch.Tensor:
    """Invert `fold_rows`."""
    requests, heads, head_dim = out_RHD.shape
    out = out_RHD.view(requests, num_kv_heads, fold, heads // (num_kv_heads * fold), head_dim)
    return out.permute(2, 0, 1, 3, 4).reshape(fold * requests, heads // fold, head_dim)
