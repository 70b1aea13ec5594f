"""Measure the ranges of a layer's keys and values on calibration data, for an 8-bit KV cache.

Both classes replace the cache object of transformers' attention. Attention passes rotated keys and
values to `update`, as a server would store them, and continues with the returned tensors.

Legend: B batch, J KV heads, S tokens, D head size.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from formats.codecs.kv_cache import kv_scale, round_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScales:
    """KV scales of one layer, float32: [1], or per head [J, 1, 1] as in compressed-tensors.

    The largest magnitude in the data maps to the largest code.
    """

    k_scale: torch.Tensor
    v_scale: torch.Tensor


class IndexKeys:
    """Layers of a cache replacement, which keep an indexer's keys as they are (MiniMax-M3)."""

    def __getitem__(self, layer: int) -> "IndexKeys":
        return self

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        return keys


class KvRange:
    """Cache replacement that records the largest magnitudes and returns its arguments unchanged."""

    layers = IndexKeys()

    def __init__(self, per_head: bool = False) -> None:
        self.per_head = per_head
        self.largest: dict[str, torch.Tensor] = {}  # [J]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for name, x_BJSD in (("keys", keys), ("values", values)):
            self._raise(name, x_BJSD.abs().amax((0, 2, 3)).float())
        return keys, values

    def merge(self, other: "KvRange") -> None:
        """Take the maximum with the magnitudes that another range recorded."""
        for name, largest_J in other.largest.items():
            self._raise(name, largest_J)

    def _raise(self, name: str, largest_J: torch.Tensor) -> None:
        before_J = self.largest.get(name, largest_J)
        self.largest[name] = torch.maximum(before_J, largest_J.to(before_J.device))

    def scales(self, kv_cache: str) -> KvScales:
        found = {}
        for name, largest_J in self.largest.items():
            scales = [kv_scale(each, kv_cache) for each in largest_J.tolist()]
            if self.per_head:
                found[name] = torch.tensor(scales).view(-1, 1, 1)
            else:
                found[name] = torch.tensor([max(scales)])
        return KvScales(k_scale=found["keys"], v_scale=found["values"])


@dataclass(frozen=True, slots=True)
class RoundedKv:
    """Cache replacement that rounds keys and values to 8 bits, to measure the effect."""

    layers: ClassVar[IndexKeys] = IndexKeys()

    scales: KvScales
    kv_cache: str

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = (
            scale.to(keys.device) for scale in (self.scales.k_scale, self.scales.v_scale)
        )
        return (
            round_kv(keys, k_scale, self.kv_cache),
            round_kv(values, v_scale, self.kv_cache),
        )
