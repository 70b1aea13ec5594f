"""CacheSpec: what one layer stores for requests, per page of tokens and per state slot.

A mixer (attention, delta net) returns its spec. Everything else that handles a cache (memory
budget, runner, drafter, host tier, KV transfer, warm-up) reads the spec and the cache's tensors,
and does not depend on the mixer. Each rank has the specs of its own mixers: a mixer that is sharded
by heads stores its heads, a mixer that is replicated stores everything on every rank.
P: pages. S: slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from formats.errors import InputError
from qkernels.attention.cache import INT4_PAGES

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

# Shape of a warm-up step: (requests, tokens per request, keys of the longest request).
WarmUpShape = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """Format of the values in KV pages, from `--kv-cache-dtype`."""

    dtype: torch.dtype
    static_scales: bool = False  # for 8-bit codes: True: the checkpoint's scales; False: at write

    @property
    def is_coded(self) -> bool:
        return self.is_int4 or self.dtype in CODE_DTYPES.values()

    @property
    def is_int4(self) -> bool:
        """True for 4-bit codes, two per byte."""
        return self.dtype == INT4_PAGES

    def refuse_int4(self, reason: str | None) -> None:
        """Raise InputError for 4-bit codes if `reason` says why a layer cannot use them."""
        if self.is_int4 and reason is not None:
            raise InputError(
                "--kv-cache-dtype int4",
                f"does not work with this model: {reason}",
                "use --kv-cache-dtype int8",
            )

    def __str__(self) -> str:
        if self.is_int4:
            return "int4, scales and zeros found on write"
        name = str(self.dtype).removeprefix("torch.")
        if not self.is_coded:
            return name
        return f"{name}, scales {'of the checkpoint' if self.static_scales else 'found on write'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of the steps that serving runs."""

    max_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Thresholds for computing chunks of many rows separately from other requests of a step.

    A pair is one row and one key of the row's request.
    """

    rows: int  # minimum number of rows of a long chunk
    pairs: int  # minimum number of pairs of all long chunks of a step
    pairs_of_graph: int  # the same for a step that would otherwise run in a CUDA graph


class Cache(Protocol):
    """The cache tensors of one layer.

    The first dimension is the page or slot number. Pages and states are copied by this number; to
    the host and to other engines they go as the bytes of these tensors, in this order.
    """

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] with the contents of pages, in dtypes that support indexed copies."""

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [S, ...] with the contents of state slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCache:
    """Cache of a layer that reads the pages of another layer."""

    source: Cache  # cache of the other layer
    page_tensors: tuple[torch.Tensor, ...] = ()
    slot_tensors: tuple[torch.Tensor, ...] = ()


class CacheSpec:
    """Sizes and tensors of one layer's cache. Each mixer type has a subclass, a frozen dataclass.

    Layers with equal specs launch the same kernels on their caches.
    """

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> Cache:
        """Create the tensors, filled with zeros, since padding rows may read unwritten pages."""
        raise NotImplementedError

    def with_drafts(self, most_rows: int) -> "CacheSpec":
        """Return the spec for speculation. `most_rows`: maximum rows of a verification."""
        return self

    @property
    def source(self) -> int | None:
        """Layer whose cache this layer reads; None: the layer has its own cache."""
        return None

    @property
    def heads_axis(self) -> int | None:
        """Axis of a page's tensors along which KV heads are sharded over ranks.

        The page dimension is not counted. None: all ranks hold the same contents.
        """
        return None

    def heads_axes(self, count: int) -> tuple[int | None, ...]:
        """Return `heads_axis` for each of the `count` tensors of a page."""
        return (self.heads_axis,) * count

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the tensors of a state slot (StateShard.slot_ranges)."""
        return ()

    @property
    def split_rule(self) -> SplitRule | None:
        """When to compute long chunks separately from other requests; None: never."""
        return None

    @property
    def divides_decodes(self) -> bool:
        """True if attention computes the decodes of a step apart from its prompt chunks."""
        return False

    @property
    def deferred_bytes(self) -> int:
        """Bytes that a step over the longest context needs in addition to the largest step."""
        return 0

    @property
    def bytes_per_page(self) -> int:
        return _bytes_of_first(self._smallest.page_tensors)

    @property
    def bytes_per_slot(self) -> int:
        return _bytes_of_first(self._smallest.slot_tensors)

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        """Raise InputError if no kernel for this cache can be captured in a CUDA graph.

        `dtype`: dtype of activations.
        """

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterable[WarmUpShape]:
        """Return shapes of steps that together launch every kernel of the cache (CUDA only).

        `dtype`: dtype of activations.
        """
        return ()

    @property
    def _smallest(self) -> Cache:
        return self.make(1, 1, torch.device("meta"))


def make_caches(
    specs: Iterable[CacheSpec], num_pages: int, num_slots: int, device: torch.device
) -> list[Cache]:
    """Create the caches of all layers."""
    caches: list[Cache] = []
    for spec in specs:
        if spec.source is None:
            caches.append(spec.make(num_pages, num_slots, device))
        else:
            caches.append(SharedCache(source=caches[spec.source]))
    return caches


def _bytes_of_first(tensors: tuple[torch.Tensor, ...]) -> int:
    """Return the bytes of one page or slot."""
    return sum(tensor[0].numel() * tensor.itemsize for tensor in tensors)
