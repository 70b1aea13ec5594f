"""Scales of an 8-bit KV cache: their keys in config.json and their tensor names.

A layer has one scale for its keys (after rotary embedding) and one for its values, or one of each
for every KV head.
"""

from collections.abc import Container
from typing import Any

import torch

from formats.errors import CheckpointError
from formats.names import KV_CACHES
from formats.numerics.activation import LARGEST
from formats.scheme import FP8_MAX

KEY = "kv_cache_scheme"
# names of a layer's scales below its self_attn, by writer; this project writes the first
KV_SCALE_NAMES = {
    "k_scale": ("k_scale", "k_proj.k_scale", "attn.k_scale", "k_proj.output_scale"),
    "v_scale": ("v_scale", "v_proj.v_scale", "attn.v_scale", "v_proj.output_scale"),
}
PER_LAYER, PER_HEAD = "tensor", "attn_head"  # compressed-tensors' strategies
MIN_KV_SCALE = 1e-10  # the scale if all keys or values are zero


def kv_scale(largest: float, kv_cache: str) -> float:
    """Return the smallest scale that clips nothing: magnitude / 127 (int8) or / 448 (fp8)."""
    return max(largest / LARGEST[KV_CACHES[kv_cache]], MIN_KV_SCALE)


def round_kv(x: torch.Tensor, scale: float | torch.Tensor, kv_cache: str) -> torch.Tensor:
    """Return x as read back from the cache, in x's dtype; large values are clipped.

    `scale` is a number, or a tensor by which x can be divided.
    """
    codes = x.float() / scale
    if kv_cache == "int8":
        codes = codes.round_().clamp_(-128, 127)
    else:
        codes = codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return (codes * scale).to(x.dtype)


def write_kv_scheme(kv_cache: str | None, per_head: bool = False) -> dict[str, Any] | None:
    """Return the value of `kv_cache_scheme`."""
    if kv_cache is None:
        return None
    return {
        "num_bits": 8,
        "type": KV_CACHES[kv_cache],
        "symmetric": True,
        "strategy": PER_HEAD if per_head else PER_LAYER,
        "group_size": None,
        "dynamic": False,
    }


def read_kv_scheme(value: Any, where: str) -> tuple[str | None, bool]:
    """Read `kv_cache_scheme`. Returns (cache format, True if every KV head has its own scales).

    Raises CheckpointError on any other kind.
    """
    if value is None:
        return None, False
    wanted = {"num_bits": 8, "symmetric": True, "dynamic": False}
    found = {**wanted, **value} if isinstance(value, dict) else {}
    strategy = found.get("strategy") or PER_LAYER
    names = {kind: name for name, kind in KV_CACHES.items()}
    kind = found.get("type", "int")
    known = isinstance(kind, str) and kind in names and strategy in (PER_LAYER, PER_HEAD)
    if any(found.get(key) != value for key, value in wanted.items()) or not known:
        raise CheckpointError(
            where,
            f"expected 8 symmetric bits, a static scale for each layer or KV head, found {value!r}",
            "remove the key to serve the model with a 16-bit KV cache",
        )
    return names[kind], strategy == PER_HEAD


def find_kv_scales(attention: str, names: Container[str]) -> dict[str, list[str]]:
    """Return the names of a layer's k_scale and v_scale tensors; empty if it has none."""
    return {
        kind: [f"{attention}.{place}" for place in places if f"{attention}.{place}" in names]
        for kind, places in KV_SCALE_NAMES.items()
    }


def check_kv_scale(name: str, scale: torch.Tensor, per_head: bool = False) -> None:
    """Raise CheckpointError unless the scale is one finite number above 0, or one for each head."""
    one = "one finite number above 0 for each KV head" if per_head else "one finite number above 0"
    if (
        (scale.numel() != 1 if not per_head else scale.numel() == 0)
        or not scale.is_floating_point()
        or not torch.isfinite(scale).all()
        or not (scale.float() > 0).all()
    ):
        raise CheckpointError(
            name,
            f"expected {one}, found {scale.flatten()[:4].tolist()}",
            "calibrate again",
        )
