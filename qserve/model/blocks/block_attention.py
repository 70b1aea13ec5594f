"""Attention to the blocks of keys that an indexer selects, and the spec of its cache.

MiniMax-M3's sparse attention. The indexer has one key per token, and a query for each KV head:

    score of a block = max over its keys of q k

The queries of a KV head attend to the `most` blocks with the highest scores. The query's own block
and the `local` - 1 blocks before it are always among them. In shorter contexts queries attend to
all keys.

Letters in names:

    T: tokens of the step
    C: hidden size
    J: KV heads
    D: width of an indexer key
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from formats.errors import InputError
from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.gpu.device import lacks_arch, sm_count
from qkernels.operands.forms import LinearInput
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import LinearOutput
from qkernels.warm_up import decode_boundaries
from qserve.model.blocks.attention import Attention, PagedKvSpec, StepInputs, announce_written
from qserve.model.blocks.indexed_cache import IndexedPages, IndexedSpec
from qserve.model.blocks.linear import (
    FLOAT_PLAN,
    Linear,
    LinearPlan,
    Product,
    applied,
    products_of,
)
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.model.cache_spec import KvFormat, StepLimits, WarmUpShape


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedKvSpec(IndexedSpec):
    """Cache spec: keys and values of this rank's KV heads, and all of an indexer's keys."""

    pages: PagedKvSpec

    @property
    def heads_axis(self) -> int:
        return self.pages.heads_axis

    def heads_axes(self, count: int) -> tuple[int | None, ...]:
        """Return the axis of each page tensor. The last one, of the indexer, is not sharded."""
        return (*self.pages.heads_axes(count - 1), None)

    def selected_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        """Yield shapes of steps that launch every kernel of attention to selected blocks."""
        page_element_size = self.pages.kv_format.dtype.itemsize
        # each row is a request of the kernel, with the keys of its blocks
        boundaries = decode_boundaries(
            max_requests=limits.max_tokens,
            max_tokens=limits.max_tokens,
            max_context_len=self.most_keys,
            page_size=self.page_size,
            head_dim=self.pages.head_dim,
            element_size=dtype.itemsize,
            page_element_size=page_element_size,
            gluon=page_element_size < dtype.itemsize and lacks_arch(device, "sm_90") is None,
            num_kv_heads=1,
            heads_per_kv_head=self.pages.num_heads // self.pages.num_kv_heads,
            window=None,
            sm_count=sm_count(device),
        )
        for rows in sorted({rows for rows, count, _ in boundaries if count == 1}):
            keys = max(rows, self.most_keys + 1)
            if keys <= limits.max_model_len:
                yield 1, rows, keys


class BlockIndexer(torch.nn.Module):
    """Scores the blocks of keys of one layer and selects those with the highest scores."""

    def __init__(
        self,
        *,
        q_proj: Linear,  # computes queries [J D]
        k_proj: Linear,  # computes keys [D]
        q_norm: Norm,  # of each query
        k_norm: Norm,
        rotary: Rotary,
        block_size: int,
        most: int,  # blocks that a query attends to
        local: int,
        dtype: torch.dtype,  # of keys
    ) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.q_norm, self.k_norm = q_proj, k_proj, q_norm, k_norm
        self.rotary, self.dtype = rotary, dtype
        self.block_size, self.most, self.local = block_size, most, local

    @property
    def width(self) -> int:
        """Width of a key (D)."""
        return len(self.k_norm.weight)

    def forward(self, x_TC: torch.Tensor, step: StepInputs, keys_PBD: torch.Tensor) -> torch.Tensor:
        """Write the tokens' keys to `keys_PBD`. Returns their queries [T, J, D]."""
        k_TD, _ = self.k_norm(applied(self.k_proj, x_TC), None, None)
        q_XD = applied(self.q_proj, x_TC).reshape(-1, self.width)
        q_TJD = self.q_norm(q_XD, None, None)[0].view(len(x_TC), -1, self.width)
        cos_sin, positions_T = self.rotary.cos_sin, step.rope_positions_T
        positions_T = step.positions_T if positions_T is None else positions_T
        table = cos_sin, positions_T, self.rotary.interleaved
        q_TJD, k_T1D = ops.apply_rope(q_TJD, k_TD[:, None], *table)
        ops.write_index_keys_(k_T1D[:, 0], keys_PBD, step.slots_T)
        return q_TJD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed:
    """Pages of one step with the indexer's queries, as `_attended` gets them."""

    cache: IndexedPages[PagedKv]
    queries_TJD: torch.Tensor


class BlockAttention(Attention):
    """Grouped-query attention of one layer with an indexer."""

    def __init__(self, *arguments: Any, indexer: BlockIndexer, **blocks: Any) -> None:
        """Other arguments are Attention's."""
        super().__init__(*arguments, **blocks)
        self.indexer = indexer

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> IndexedKvSpec:
        """Return the spec of the layer's pages.

        Raises InputError if a block is not a whole number of pages.
        """
        block_size = self.indexer.block_size
        if block_size % page_size:
            raise InputError(
                f"--block-size {page_size}",
                f"does not divide index_block_size, {block_size} tokens, of the model",
                "use a divisor of it",
            )
        return IndexedKvSpec(
            pages=super().cache_spec(kv_format, page_size),
            page_size=page_size,
            width=self.indexer.width,
            dtype=self.indexer.dtype,
            most_keys=block_size * self.indexer.most,
        )

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from super().products()
        yield from products_of(self.indexer.q_proj, None)
        yield from products_of(self.indexer.k_proj, None)

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, because the indexer reads the same norm."""
        return FLOAT_PLAN

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: IndexedPages[PagedKv]
    ) -> LinearOutput:
        """Store the keys of the step's tokens [T, C], and attend to selected keys.

        The result is the input of the next norm.
        """
        queries_TJD = self.indexer(x_TC, step, cache.keys_PBD)
        plan = self.qkv_proj.plan(x_TC.shape[0], self._qkv_consumer)
        x_TC = ops.in_form(x_TC, plan.input)
        q, gate = self._written(x_TC, plan, step, cache.pages)
        announce_written(step, cache)
        return self._attended(q, gate, step, _Indexed(cache=cache, queries_TJD=queries_TJD))

    def _scored(
        self, q: torch.Tensor, step: StepInputs, cache: _Indexed, limbs: LimbForm | None
    ) -> Any:
        """Return the attention output [T, H, D], or its limbs."""
        kv, indexer = cache.cache.pages, self.indexer
        if step.max_context_len <= indexer.most * indexer.block_size:
            return super()._scored(q, step, kv, limbs)
        selected = ops.select_blocks(
            cache.queries_TJD,
            cache.cache.keys_PBD,
            step,
            block_size=indexer.block_size,
            most=indexer.most,
            local=indexer.local,
        )
        out_THD = ops.block_attention(q, kv, selected, scale=self.scale, kernel=self.kernel)
        return out_THD if limbs is None else ops.to_limbs(out_THD.flatten(1), limbs)
