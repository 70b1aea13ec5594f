"""Multi-head latent attention (MLA) over paged latents, and the spec of its cache.

The cache has one entry per token, shared by all heads: the normed latent c, then the rotated key r.
Short chunks compute no keys and values per head: W_UK is multiplied into the queries, and W_UV into
the result (absorption).

    score = (q_n W_UK) c + q_r r        out = (sum of weights * c) W_UV

Long chunks compute keys and values per head from the entries (expansion):

    score = q_n (W_UK c) + q_r r        out = sum of weights * (c W_UV)

Letters in names:

    T: tokens of the step
    C: hidden size
    H: heads
    P: width of a query's part without RoPE (q_n)
    R: width of a query's rotated part (q_r)
    L: width of a latent
    V: width of a value
    E: width of a cache entry, L + R
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.attention.cache import AttentionStep
from qkernels.choice import FIXED_ORDER
from qkernels.gpu.device import shared_bytes, sm_count
from qkernels.latent.cache import PagedLatents, is_aligned
from qkernels.latent.config import expanded_boundaries, latent_boundaries, selected_boundaries
from qkernels.latent.expanded import MAX_BYTES, absorbed_heads, expanded_rows
from qkernels.latent.fixed_order.config import segment_boundaries
from qkernels.latent.rows import SM90_DECODE
from qkernels.latent.selected.selected_keys import SelectedKeys
from qkernels.latent.sm90_decode_config import sm90_latent_boundaries
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qkernels.operations import explain
from qserve.model.blocks.attention import SplitStep, StepInputs, check_capturable
from qserve.model.blocks.gates import repeated
from qserve.model.blocks.indexed_cache import IndexedPages
from qserve.model.blocks.latent.adapters import LatentAdapters
from qserve.model.blocks.latent.indexer import IndexedLatentsSpec, Indexer, Selection
from qserve.model.blocks.latent.window import Window
from qserve.model.blocks.linear import FLOAT_PLAN, Linear, LinearPlan, Product, products_of
from qserve.model.blocks.rotary import Rotary
from qserve.model.cache_spec import CacheSpec, KvFormat, SplitRule, StepLimits, WarmUpShape

# Epsilon of the norms of latents. transformers uses this default and ignores rms_norm_eps; the
# tests compare with transformers. vLLM uses rms_norm_eps, which is 1e-5 in some models.
INNER_NORM_EPS = 1e-6
# Rows times keys times heads that absorption computes in 1 ms (H100: 84 TFLOP/s). Python needs
# about 1 ms to launch the kernels of a layer, and a third of a millisecond for those of an
# expansion.
PAIRS_OF_MS = 36_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of one layer's attention. `heads` counts the heads of this rank."""

    heads: int
    nope: int  # P
    rope: int  # R
    value: int  # V
    latent: int  # L

    @property
    def entry(self) -> int:
        """Width of a cache entry (E)."""
        return self.latent + self.rope

    @property
    def queries(self) -> int:
        """Number of outputs of the query projection."""
        return self.heads * (self.nope + self.rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLatentsSpec(CacheSpec):
    """Cache spec: one entry per token. Every rank holds whole entries."""

    shape: LatentShape
    dtype: torch.dtype
    page_size: int
    kernel: str | None  # selected or excluded by name
    window: int | None = None  # None: queries attend to all keys

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> PagedLatents:
        shape = num_pages, self.page_size, self.shape.entry
        return PagedLatents.zeros(shape, self.dtype, device)

    @property
    def split_rule(self) -> SplitRule | None:
        if self.kernel == FIXED_ORDER:
            return None  # expansion would compute other products, so other bits
        sizes = self.shape
        rows = expanded_rows(
            heads=sizes.heads, latent=sizes.latent, nope=sizes.nope, value=sizes.value
        )
        if rows is None:
            return None
        pairs = PAIRS_OF_MS // absorbed_heads(sizes.heads)
        return SplitRule(rows=rows, pairs=max(1, pairs // 3), pairs_of_graph=max(1, pairs))

    @property
    def deferred_bytes(self) -> int:
        return 0 if self.split_rule is None else MAX_BYTES * 5 // 4  # a quarter more for entries

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        check_capturable(
            "latent_attention",
            f"latent attention over pages of {self.page_size} tokens",
            "give --enforce-eager to run it slowly",
            **self._problem(dtype, device),
        )

    def _problem(self, dtype: torch.dtype, device: str) -> dict[str, object]:
        """Fields of the Problem from which the kernel is chosen."""
        return {
            "device": device,
            "dtype": dtype,
            "requested": self.kernel,
            "head_dim": self.shape.entry,
            "latent_width": self.shape.latent,
            "page_size": self.page_size,
            "pages_dtype": self.dtype,
            "tma_pages": is_aligned(self.shape.entry, self.shape.latent),
        }

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        if self.kernel == FIXED_ORDER:
            yield from segment_boundaries(
                max_requests=limits.max_num_seqs,
                max_tokens=limits.max_tokens,
                max_context_len=limits.max_model_len,
            )
            return
        if self.window is not None and limits.max_model_len > self.window:
            yield from selected_boundaries(
                heads=self.shape.heads,
                element_size=dtype.itemsize,
                sm_count=sm_count(device),
                shared_bytes=shared_bytes(device),
                entry=self.shape.entry,
                most=self.window,
                max_tokens=limits.max_tokens,
                max_context_len=limits.max_model_len,
            )
        most = {
            "max_requests": limits.max_num_seqs,
            "max_tokens": limits.max_tokens,
            "max_context_len": limits.max_model_len,
        }
        choices = explain("latent_attention", **self._problem(dtype, device.type))
        if any(each.taken and each.name == SM90_DECODE for each in choices):
            yield from sm90_latent_boundaries(
                heads=self.shape.heads, sm_count=sm_count(device), **most
            )
        else:
            yield from latent_boundaries(
                heads=self.shape.heads,
                element_size=dtype.itemsize,
                sm_count=sm_count(device),
                shared_bytes=shared_bytes(device),
                entry=self.shape.entry,
                **most,
            )
        rule = self.split_rule
        if rule is not None and rule.rows <= limits.max_tokens:
            yield from expanded_boundaries(
                heads=self.shape.heads,
                width=max(self.shape.nope + self.shape.rope, self.shape.value),
                element_size=dtype.itemsize,
                sm_count=sm_count(device),
                min_rows=rule.rows,
                min_pairs=rule.pairs,
                max_tokens=limits.max_tokens,
                max_context_len=limits.max_model_len,
            )


class LatentAttention(torch.nn.Module):
    """Attention of one layer over latents."""

    has_kv_scales = False

    def __init__(
        self,
        shape: LatentShape,
        *,
        rotary: Rotary,
        qkv_proj: Linear,  # computes queries or query latents, then c and r
        q_b_proj: Linear | None,  # computes queries from latents; None: qkv_proj computes queries
        o_proj: Linear,
        q_norm: torch.Tensor | None,  # norm of query latents
        kv_norm: torch.Tensor,  # [L]
        key_up: torch.Tensor,  # W_UK [H, P, L]
        value_up: torch.Tensor,  # W_UV [H, L, V]
        scale: float,  # of attention scores
        norm_eps: float = INNER_NORM_EPS,
        key_norm: torch.Tensor | None = None,  # norm of the rotated key [R]; None: it has none
        window: Window | None = None,  # None: queries attend to all keys, or to selected ones
        query_scales: torch.Tensor | None = None,  # float32 [positions]
        indexer: Indexer | None = None,  # None: the layer has no indexer
        selection: Selection | None = None,  # None: queries attend to all keys
        gates: Linear | None = None,  # outputs one gate per head; None: results are not gated
        kernel: str | None = None,  # selected or excluded by name
    ) -> None:
        super().__init__()
        self.indexer, self.selection, self.gates = indexer, selection, gates
        self.shape, self.scale, self.kernel, self.rotary = shape, scale, kernel, rotary
        self.norm_eps, self.window = norm_eps, window
        # A table that changes nothing: one row with cosines 1 and sines 0, for all positions.
        self.rotates, half = rotary.cos_sin.shape[1] > 0, shape.rope // 2
        table = rotary.cos_sin.new_zeros(1, 2 * half)
        table[:, :half] = 1
        self.register_buffer("still", None if self.rotates else table)
        self.qkv_proj, self.q_b_proj, self.o_proj = qkv_proj, q_b_proj, o_proj
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("kv_norm", kv_norm)
        self.register_buffer("key_norm", key_norm)
        self.register_buffer("key_up", key_up)
        self.register_buffer("value_up", value_up)
        self.register_buffer("query_scales", query_scales)
        self.adapters: LatentAdapters | None = None  # for kv_b_proj; set with --enable-lora

    def cache_spec(
        self, kv_format: KvFormat, page_size: int
    ) -> PagedLatentsSpec | IndexedLatentsSpec:
        """Return the spec of the layer's pages. Raises InputError for 4-bit pages."""
        kv_format.refuse_int4("latent attention has entries of 16 and 8 bits alone")
        latents = PagedLatentsSpec(
            shape=self.shape,
            dtype=kv_format.dtype,
            page_size=page_size,
            kernel=self.kernel,
            window=None if self.window is None else self.window.size,
        )
        if self.indexer is None:
            return latents
        return IndexedLatentsSpec(
            pages=latents,
            heads=self.shape.heads,
            entry=self.shape.entry,
            page_size=page_size,
            width=self.indexer.width,
            dtype=self.kv_norm.dtype,
            most_keys=self.indexer.most,
        )

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from products_of(self.qkv_proj, None)
        if self.q_b_proj is not None:
            yield from products_of(self.q_b_proj, None)
        if self.indexer is not None:
            yield from products_of(self.indexer.wq_b, None)
            yield from products_of(self.indexer.wk, None)
        if self.gates is not None:
            yield from products_of(self.gates, None)
        yield from products_of(self.o_proj, "norm")

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear, which sets the output form of the norm before it.

        With an indexer or gates the norm outputs a plain tensor, because they read it too.
        """
        return FLOAT_PLAN if self._has_other_readers else self.qkv_proj.plan(rows)

    @property
    def _has_other_readers(self) -> bool:
        """True if not only qkv_proj reads the norm before it."""
        return self.indexer is not None or self.gates is not None

    def forward(
        self,
        x_TC: LinearInput,
        plan: LinearPlan,
        step: StepInputs,
        cache: PagedLatents | IndexedPages[PagedLatents],
    ) -> LinearOutput:
        """Store the entries of the step's tokens [T, C]; attend to all tokens of their requests.

        The result is the input of the next norm.
        """
        shape, read_TC, indexed = self.shape, x_TC, cache
        if self.indexer is not None:
            cache = indexed.pages
        if self._has_other_readers:
            plan = self.qkv_proj.plan(x_TC.shape[0])
            x_TC = ops.in_form(x_TC, plan.input)
        made = reduced(self.qkv_proj(x_TC, plan))
        q, made_TE = made.split([made.shape[1] - shape.entry, shape.entry], dim=1)
        if self.q_b_proj is not None:
            q = self._normed(q, self.q_norm)
        if self.indexer is not None:
            index_q_TID = self.indexer(read_TC, q, step, indexed.keys_PBD)
        q_THD = self._queries(q)
        if self.query_scales is not None:
            q_THD = q_THD * self.query_scales[step.positions_T, None, None].to(q_THD.dtype)
        q_n_THP, q_r_THR = q_THD.split([shape.nope, shape.rope], dim=-1)
        if self.key_norm is not None:
            latents_TL, keys_TR = made_TE.split([shape.latent, shape.rope], dim=1)
            made_TE = torch.cat([latents_TL, self._normed(keys_TR, self.key_norm)], dim=1)
        turns = (self.rotary.cos_sin, step.positions_T)
        if not self.rotates:
            turns = (self.still, torch.zeros_like(step.positions_T))
        q_THE = ops.rope_write_latents_(
            q_r_THR,
            made_TE,
            self.kv_norm,
            *turns,
            cache,
            step.slots_T,
            eps=self.norm_eps,
            interleaved=self.rotary.interleaved,
        )
        if step.exchange is not None:
            step.exchange.exchange_(indexed)
        if step.on_written is not None:
            step.on_written(indexed)
        if self.indexer is not None:
            self.selection.keys = None
            if step.max_context_len > self.indexer.most:
                selected = self.indexer.select(read_TC, index_q_TID, step, indexed.keys_PBD)
                self.selection.keys = selected
        selected = None if self.selection is None else self.selection.keys
        if self.window is not None:
            selected = self.window.keys(step, made.shape[0], cache.page_size)
        # Adapters and selected keys work only with absorption.
        if step.split is None or selected is not None or self._adapters is not None:
            out_THV = self._absorbed(q_n_THP, q_THE, cache, step, selected)
        else:
            out_THV = self._split(q_n_THP, q_THE, cache, step.split)
        if self.gates is not None:
            gates_TH1 = reduced(self.gates(read_TC)).float()[..., None]
            if gates_TH1.device.type == "cpu":
                gates_TH1 = repeated(gates_TH1, out_THV)
            out_THV = out_THV * gates_TH1.sigmoid().to(out_THV.dtype)
        output = self.o_proj.plan(made.shape[0], "norm")
        return self.o_proj(ops.in_form(out_THV.flatten(1), output.input), output)

    def _absorbed(
        self,
        q_n_THP: torch.Tensor,
        q_THE: torch.Tensor,
        cache: PagedLatents,
        step: AttentionStep,
        selected: SelectedKeys | None = None,
    ) -> torch.Tensor:
        """Attend over all or the selected entries by absorption. Returns [T, H, V].

        Writes absorbed queries to the first L channels of `q_THE`.
        """
        absorbed_THL = q_THE[..., : self.shape.latent]
        if self.kernel == FIXED_ORDER:
            ops.fixed_order_heads(q_n_THP, self.key_up, absorbed_THL)
        else:
            torch.bmm(q_n_THP.transpose(0, 1), self.key_up, out=absorbed_THL.transpose(0, 1))
        adapters = self._adapters
        if adapters is not None:
            adapters.add_queries_(absorbed_THL, q_n_THP)
        settings = {"latent_width": self.shape.latent, "scale": self.scale, "kernel": self.kernel}
        if selected is None:
            out_THL = ops.latent_attention(q_THE, cache, step, **settings)
        else:
            out_THL = ops.selected_latent_attention(q_THE, cache, selected, **settings)
        if self.kernel == FIXED_ORDER:
            out_THV = ops.fixed_order_heads(out_THL, self.value_up)
        else:
            out_THV = torch.bmm(out_THL.transpose(0, 1), self.value_up).transpose(0, 1)
        if adapters is not None:
            adapters.add_results_(out_THV, out_THL)
        return out_THV

    @property
    def _adapters(self) -> LatentAdapters | None:
        """The adapters of kv_b_proj; None if no row of this step has an adapter."""
        if self.adapters is None or self.adapters.slots_T is None:
            return None
        return self.adapters

    def _split(
        self, q_n_THP: torch.Tensor, q_THE: torch.Tensor, cache: PagedLatents, split: SplitStep
    ) -> torch.Tensor:
        """Attend by expansion for long chunks, by absorption for the others. Returns [T, H, V]."""
        shape = self.shape
        out_THV = q_THE.new_empty((*q_THE.shape[:2], shape.value))
        if split.others is not None:
            rows = split.other_rows
            out_THV[rows] = self._absorbed(q_n_THP[rows], q_THE[rows], cache, split.others)
        for chunks in split.expanded:
            parts = (q_n_THP[chunks.rows], q_THE[chunks.rows][..., shape.latent :])
            out_THV[chunks.rows] = ops.expanded_latent_attention(
                torch.cat(parts, dim=-1),
                cache,
                chunks,
                self.key_up,
                self.value_up,
                scale=self.scale,
            )
        return out_THV

    def _queries(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries [T, H, P + R]. `q`: queries from qkv_proj, or normed query latents."""
        if self.q_b_proj is not None:
            plan = self.q_b_proj.plan(q.shape[0])
            q = reduced(self.q_b_proj(ops.in_form(q, plan.input), plan))
        return q.unflatten(1, (self.shape.heads, -1))

    def _normed(self, x_TL: torch.Tensor, weight_L: torch.Tensor) -> torch.Tensor:
        spec = ops.NormSpec(weight_C=weight_L, eps=self.norm_eps)
        return ops.norm(x_TL.contiguous(), None, spec)[0]
