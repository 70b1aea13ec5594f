"""Descriptions of the tensors that a rank's pages and states consist of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from formats.in_memory.slices import Rows
from qserve.kv_transfer.peer.layout import PageTensor
from qserve.model.cache_spec import Cache, CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCache:
    """The states of a layer as a Cache whose pages are the slots of states."""

    page_tensors: tuple[torch.Tensor, ...]
    slot_tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, cache: Cache) -> "SlotCache":
        """Take the states of a cache. A slot of a tensor [S] becomes a row with one entry."""
        return cls(
            page_tensors=tuple(
                each.unsqueeze(1) if each.dim() == 1 else each for each in cache.slot_tensors
            )
        )


def page_tensors(
    specs: Sequence[CacheSpec], caches: Sequence[Cache], first_kv_heads: Sequence[int]
) -> list[PageTensor]:
    """Describe this rank's pages. `first_kv_heads`: its first KV head, by layer."""
    found = []
    for layer, (spec, cache) in enumerate(zip(specs, caches, strict=True)):
        tensors, first = cache.page_tensors, first_kv_heads[layer]
        for tensor, axis in zip(tensors, spec.heads_axes(len(tensors)), strict=True):
            count = 0 if axis is None else tensor.shape[axis + 1]
            ranges = [(first, first + count)] if axis is not None else []
            found.append(_described(layer, tensor, axis, ranges))
    return found


def state_tensors(
    specs: Sequence[CacheSpec],
    caches: Sequence[SlotCache],
    ranges: Sequence[Mapping[str, tuple[int, Rows]]],
    others: Iterable[SlotCache] = (),
) -> list[PageTensor]:
    """Describe this rank's states.

    `ranges`: for each layer, the sharded axis and the rank's ranges of each tensor, by name.
    `others`: further tensors, which are equal on all ranks.
    """
    found = []
    for layer, (spec, cache) in enumerate(zip(specs, caches, strict=True)):
        for name, tensor in zip(spec.slot_names, cache.page_tensors, strict=True):
            axis, rows = ranges[layer][name]
            own = [(int(first), int(stop)) for first, stop in rows]
            width = sum(stop - first for first, stop in own)
            assert width == tensor.shape[axis + 1], f"layer {layer}: {name} has other heads"
            found.append(_described(layer, tensor, axis, own))
    for layer, cache in enumerate(others, len(specs)):
        found += [_described(layer, tensor, None, []) for tensor in cache.page_tensors]
    return found


def _described(
    layer: int, tensor: torch.Tensor, axis: int | None, ranges: list[tuple[int, int]]
) -> PageTensor:
    return PageTensor(
        layer=layer,
        shape=list(tensor.shape[1:]),
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=tensor.itemsize,
        axis=axis,
        ranges=ranges,
    )
