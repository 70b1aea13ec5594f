"""Two parallel mixers that read the same norm: attention and Mamba-2 (Falcon-H1).

T: tokens of the step. C: hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkernels import ops
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import reduced
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.model.blocks.linear import FLOAT_PLAN, LinearPlan, Product, RowParallel
from qserve.model.blocks.states.mamba2 import Mamba2
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat, StepLimits, WarmUpShape
from qserve.parallel.communicator import RankPartial


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePair:
    """The caches of a layer's two mixers."""

    pages: Cache
    states: Cache

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of both mixers."""
        return (*self.pages.page_tensors, *self.states.page_tensors)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of both mixers."""
        return (*self.pages.slot_tensors, *self.states.slot_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec(CacheSpec):
    """The cache specs of a layer's two mixers."""

    pages: CacheSpec
    states: CacheSpec

    @property
    def slot_names(self) -> tuple[str, ...]:
        return self.states.slot_names

    def heads_axes(self, count: int) -> tuple[int | None, ...]:
        """Return the axis of KV heads of attention's pages; the other mixer has no pages."""
        return self.pages.heads_axes(count)

    def with_drafts(self, most_rows: int) -> CacheSpec:
        return PairSpec(
            pages=self.pages.with_drafts(most_rows), states=self.states.with_drafts(most_rows)
        )

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> CachePair:
        return CachePair(
            pages=self.pages.make(num_pages, num_slots, device),
            states=self.states.make(num_pages, num_slots, device),
        )

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        for spec in (self.pages, self.states):
            spec.check_graphs(dtype, device)

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        for spec in (self.pages, self.states):
            yield from spec.warm_up_shapes(limits, dtype, device)


class SideBySide(torch.nn.Module):
    """attention(x) * attention_factor + mamba(x) * mamba_factor."""

    def __init__(
        self,
        *,
        attention: Attention,
        mamba: Mamba2,
        attention_factor: float = 1.0,
        mamba_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention, self.mamba = attention, mamba
        for linear in (attention.o_proj, mamba.out_proj):
            if isinstance(linear, RowParallel):
                linear.overlaps = False  # `forward` adds both results before the sum over ranks
        self.attention_factor, self.mamba_factor = attention_factor, mamba_factor

    @property
    def has_kv_scales(self) -> bool:
        """True if the checkpoint has the scales of an 8-bit KV cache."""
        return self.attention.has_kv_scales

    def products(self) -> Iterator[Product]:
        """Yield the quantized products, each with the operation that consumes its result."""
        yield from self.attention.products()
        yield from self.mamba.products()

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, because both mixers read the same norm."""
        return FLOAT_PLAN

    def cache_spec(self, kv_format: KvFormat, page_size: int) -> CacheSpec:
        """Return the specs of attention's pages and of Mamba-2's states."""
        return PairSpec(
            pages=self.attention.cache_spec(kv_format, page_size),
            states=self.mamba.cache_spec(kv_format, page_size),
        )

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, step: StepInputs, cache: CachePair
    ) -> torch.Tensor | RankPartial:
        """Run both mixers on the step's tokens and add their results."""
        results, communicator = [], None
        for mixer, own in ((self.attention, cache.pages), (self.mamba, cache.states)):
            wanted = mixer.plan(x_TC.shape[0])
            result = mixer(ops.in_form(x_TC, wanted.input), wanted, step, own)
            if isinstance(result, RankPartial):  # true for both mixers: all-reduce only their sum
                result, communicator = result.x, result.communicator
            results.append(reduced(result))
        attention_TC, mamba_TC = results
        sum_TC = attention_TC * self.attention_factor + mamba_TC * self.mamba_factor
        if communicator is None:
            return sum_TC
        return RankPartial(x=sum_TC, communicator=communicator)
