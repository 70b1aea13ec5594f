"""Pages of a layer whose queries attend to keys that an indexer selects, and their cache spec.

Legend: P pages, B tokens of a page, D width of an indexer key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from qkernels.attention.cache import PagedKv
from qkernels.attention.selected.order import MAX_BYTES
from qkernels.latent.cache import PagedLatents
from qserve.model.cache_spec import CacheSpec, StepLimits, WarmUpShape

Pages = TypeVar("Pages", PagedKv, PagedLatents)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedPages(Generic[Pages]):
    """Pages that attention reads, and the keys by which the indexer scores tokens.

    A token has the same slot, page * B + offset, in both.
    """

    pages: Pages
    keys_PBD: torch.Tensor  # in the activations' dtype

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of the contents of pages, as bytes. The indexer's keys are the last."""
        return (*self.pages.page_tensors, self.keys_PBD.view(torch.uint8))

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty: there are no state slots."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSpec(CacheSpec):
    """Cache spec: the pages that attention reads, and all of the indexer's keys on every rank."""

    pages: CacheSpec
    page_size: int
    width: int  # D
    dtype: torch.dtype  # of the indexer's keys, the same as of activations
    most_keys: int  # maximum number of keys that a query attends to

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> IndexedPages:
        shape = num_pages, self.page_size, self.width
        return IndexedPages(
            pages=self.pages.make(num_pages, num_slots, device),
            keys_PBD=torch.zeros(shape, dtype=self.dtype, device=device),
        )

    @property
    def deferred_bytes(self) -> int:
        # the scores, their order in twice the bytes, and the workspace of topk
        return self.pages.deferred_bytes + 7 * MAX_BYTES

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        self.pages.check_graphs(dtype, device)

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        yield from self.pages.warm_up_shapes(limits, dtype, device)
        yield from self.selected_shapes(limits, dtype, device)

    def selected_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterator[WarmUpShape]:
        """Yield shapes of steps that launch every kernel of attention to selected keys."""
        raise NotImplementedError
