"""CacheSpec: what one layer keeps of requests, by page of tokens and by state slot.

A mixer (attention, delta net) returns its spec. Everything else that handles a cache (memory
budget, runner, drafter, host tier, KV transfer, warm-up) reads the spec and the cache's tensors,
and does not know the mixer. Each rank has the specs of its own mixers: one that holds a shard of
the heads keeps those heads, and one that every rank holds whole keeps all on every rank.
Legend: P pages, S slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from formats.errors import InputError
from qkernels.attention.cache import INT4_PAGES

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

# Shape of a warm-up step: requests, tokens of each, keys that the longest request sees.
WarmUpShape = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """How `--kv-cache-dtype` stores the numbers of a page."""

    dtype: torch.dtype
    static_scales: bool = False  # 8-bit codes: scales of the checkpoint, else found on write

    @property
    def is_coded(self) -> bool:
        return self.is_int4 or self.dtype in CODE_DTYPES.values()

    @property
    def is_int4(self) -> bool:
        """True for 4-bit codes, two a byte."""
        return self.dtype == INT4_PAGES

    def refuse_int4(self, reason: str | None) -> None:
        """Raise InputError if codes have 4 bits and there is a reason why they cannot."""
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
    """Largest steps that serving can reach."""

    max_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Steps in which chunks of many rows are computed apart from other requests.

    A pair is a row and a key that the request has.
    """

    rows: int  # of a chunk at least
    pairs: int  # of these chunks at least
    pairs_of_graph: int  # of these chunks from which a step leaves its CUDA graph for it


class Cache(Protocol):
    """Tensors of one layer.

    Pages and states are copied between indices of the first dimension, and to the host and to
    other engines as the bytes of these tensors in their order.
    """

    @property
    def page_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [P, ...] of what a page holds, of dtypes that indexed copies take."""

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [S, ...] of what a state slot holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCache:
    """Cache of a layer that reads the pages of another layer."""

    source: Cache  # the other layer's
    page_tensors: tuple[torch.Tensor, ...] = ()
    slot_tensors: tuple[torch.Tensor, ...] = ()


class CacheSpec:
    """Sizes and tensors of one layer's cache. Each kind of mixer has a frozen dataclass of it.

    Layers with equal specs launch equal kernels on their caches.
    """

    def make(self, num_pages: int, num_slots: int, device: torch.device) -> Cache:
        """Make the tensors, zeros: padding rows may read a page before it is written."""
        raise NotImplementedError

    def with_drafts(self, most_rows: int) -> "CacheSpec":
        """Return the spec with speculation, whose verifications have up to `most_rows` rows."""
        return self

    @property
    def source(self) -> int | None:
        """Layer whose cache this layer reads; None: it has one of its own."""
        return None

    @property
    def heads_axis(self) -> int | None:
        """Axis of a page's tensors along which ranks hold different KV heads; None: they are alike.

        The dimension of pages is not counted.
        """
        return None

    @property
    def split_rule(self) -> SplitRule | None:
        """Steps whose long chunks are computed apart from other requests; None: no step is."""
        return None

    @property
    def bytes_to_come(self) -> int:
        """Device memory of a step over the longest context, in addition to the largest step's."""
        return 0

    @property
    def bytes_per_page(self) -> int:
        return _bytes_of_first(self._smallest.page_tensors)

    @property
    def bytes_per_slot(self) -> int:
        return _bytes_of_first(self._smallest.slot_tensors)

    def check_graphs(self, dtype: torch.dtype, device: str) -> None:
        """Raise InputError where no kernel takes this cache that a CUDA graph can capture.

        `dtype`: of activations.
        """

    def warm_up_shapes(
        self, limits: StepLimits, dtype: torch.dtype, device: torch.device
    ) -> Iterable[WarmUpShape]:
        """Shapes of steps that together launch every kernel that reads the cache (CUDA only).

        `dtype`: of activations.
        """
        return ()

    @property
    def _smallest(self) -> Cache:
        return self.make(1, 1, torch.device("meta"))


def make_caches(
    specs: Iterable[CacheSpec], num_pages: int, num_slots: int, device: torch.device
) -> list[Cache]:
    """Make the caches of all layers."""
    caches: list[Cache] = []
    for spec in specs:
        if spec.source is None:
            caches.append(spec.make(num_pages, num_slots, device))
        else:
            caches.append(SharedCache(source=caches[spec.source]))
    return caches


def _bytes_of_first(tensors: tuple[torch.Tensor, ...]) -> int:
    """Bytes of one page or slot."""
    return sum(tensor[0].numel() * tensor.itemsize for tensor in tensors)
