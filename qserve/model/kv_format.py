"""Choice of the KV cache format: the activations' dtype, or 8- or 4-bit codes."""

import torch

from formats.architecture.columns import ATTENTION
from formats.errors import CheckpointError, InputError
from qkernels.attention.cache import INT4_PAGES
from qserve.model.cache_spec import CODE_DTYPES, KvFormat
from qserve.model.decoder import Decoder

FLAG = "--kv-cache-dtype"


def pick_kv_format(name: str, decoder: Decoder, device: torch.device) -> KvFormat:
    """Return the format for a value of `--kv-cache-dtype`. Raises InputError or CheckpointError.

    "auto" selects 8 bits if the checkpoint was calibrated for them, else the activations' dtype.
    """
    quant = decoder.config.quant
    calibrated = quant.kv_cache if quant is not None else None
    has_scales = calibrated is not None and _has_scales(decoder)
    if name == "auto":
        if not has_scales:
            return KvFormat(dtype=decoder.dtype)
        name = calibrated
    if name == "int4":
        return KvFormat(dtype=INT4_PAGES)
    if name == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise InputError(
            f"{FLAG} fp8",
            "needs a GPU of compute capability 8.9 or later, found"
            f" {'.'.join(map(str, torch.cuda.get_device_capability()))}",
            f"use {FLAG} int8",
        )
    return KvFormat(dtype=CODE_DTYPES[name], static_scales=has_scales and name == calibrated)


def _has_scales(decoder: Decoder) -> bool:
    """Return True if all layers with keys and values have a k_scale and a v_scale.

    Raises CheckpointError if only some of them have these scales.
    """
    found = {number: layer.attention.has_kv_scales for number, layer in enumerate(decoder.layers)}
    having = {number: has for number, has in found.items() if has is not None}
    if any(having.values()) and not all(having.values()):
        number = next(number for number, has in having.items() if not has)
        raise CheckpointError(
            f"{decoder.config.family.layer.format(i=number)}.{ATTENTION}",
            "expected a k_scale and a v_scale, as other layers have, found none",
            "calibrate again",
        )
    return all(having.values())
