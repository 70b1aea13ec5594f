"""What calibration data says about a layer's keys and values, for an 8-bit KV cache.

Both classes stand where transformers' attention expects its cache: it hands over keys after their
rotation and values, just as a server would store them, and goes on with what it gets back.
Legend: B batch, J KV heads, S tokens, D head size.
"""

from dataclasses import dataclass

import torch

from formats.kv_cache import kv_scale, round_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScales:
    """One layer's scales, float32: [1], or [J, 1, 1] as compressed-tensors has them for heads.

    The largest magnitude that the data had is the largest code.
    """

    k_scale: torch.Tensor
    v_scale: torch.Tensor


class KvRange:
    """Remembers the largest magnitudes; changes nothing."""

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
        """Remember what another one saw, too."""
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
    """Gives back what an 8-bit cache would: for measuring what it costs."""

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
