"""What calibration data says about a layer's keys and values, for an 8-bit KV cache.

Both classes stand where transformers' attention expects its cache: it hands over keys after their
rotation and values, just as a server would store them, and goes on with what it gets back.
"""

from dataclasses import dataclass

import torch

from formats.kv_cache import kv_scale, round_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScales:
    """One layer's scales. The largest magnitude that the data had is the largest code."""

    k_scale: float
    v_scale: float


class KvRange:
    """Remembers the largest magnitudes; changes nothing."""

    def __init__(self) -> None:
        self.largest = {"keys": 0.0, "values": 0.0}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for name, x in (("keys", keys), ("values", values)):
            self.largest[name] = max(self.largest[name], float(x.abs().max()))
        return keys, values

    def scales(self, kv_cache: str) -> KvScales:
        return KvScales(
            k_scale=kv_scale(self.largest["keys"], kv_cache),
            v_scale=kv_scale(self.largest["values"], kv_cache),
        )


@dataclass(frozen=True, slots=True)
class RoundedKv:
    """Gives back what an 8-bit cache would: for measuring what it costs."""

    scales: KvScales
    kv_cache: str

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            round_kv(keys, self.scales.k_scale, self.kv_cache),
            round_kv(values, self.scales.v_scale, self.kv_cache),
        )
