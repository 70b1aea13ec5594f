"""What KV pages hold: numbers of the activations' dtype, or 8-bit codes and their scales.

Knows settings and checkpoints, not requests.
"""

from dataclasses import dataclass

import torch

from formats.errors import CheckpointError, InputError
from formats.family import ATTENTION
from qkernels import dispatch
from qkernels.attention.cache import PagedKv
from qserve.model.blocks.attention import Attention
from qserve.model.blocks.delta_net import DeltaNet
from qserve.model.decoder import Decoder

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE_BYTES = 4  # float32, one for each slot and KV head
FLAG = "--kv-cache-dtype"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """How one key or value is stored."""

    dtype: torch.dtype
    static_scales: bool = False  # of 8-bit codes: the checkpoint's; else found on write

    @property
    def is_coded(self) -> bool:
        return self.dtype in CODE_DTYPES.values()

    def bytes_per_head(self, head_dim: int) -> int:
        """Of one key or value of one KV head."""
        has_scale = self.is_coded and not self.static_scales
        return head_dim * self.dtype.itemsize + (SCALE_BYTES if has_scale else 0)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if not self.is_coded:
            return name
        return f"{name}, scales {'of the checkpoint' if self.static_scales else 'found on write'}"


def pick_kv_format(name: str, decoder: Decoder, device: torch.device) -> KvFormat:
    """The format that `--kv-cache-dtype` asks for. Raises InputError or CheckpointError.

    "auto" is 8-bit where the checkpoint was calibrated for it, else the activations' dtype.
    """
    quant = decoder.config.quant
    calibrated = quant.kv_cache if quant is not None else None
    has_scales = calibrated is not None and _has_scales(decoder)
    if name == "auto":
        if not has_scales:
            return KvFormat(dtype=decoder.dtype)
        name = calibrated
    if name == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise InputError(
            f"{FLAG} fp8",
            "needs a GPU of compute capability 8.9 or later, found"
            f" {'.'.join(map(str, torch.cuda.get_device_capability()))}",
            f"use {FLAG} int8",
        )
    return KvFormat(dtype=CODE_DTYPES[name], static_scales=has_scales and name == calibrated)


def refuse_attention_without_kernel(
    decoder: Decoder, kv_format: KvFormat, page_size: int, device: str
) -> None:
    """Raise InputError where plain torch would attend, which CUDA graphs cannot capture."""
    for layer in decoder.layers:
        attention = layer.attention
        if not isinstance(attention, Attention):
            continue
        choices = dispatch.explain(
            "paged_attention",
            device=device,
            dtype=decoder.dtype,
            requested=attention.kernel,
            head_dim=attention.head_dim,
            page_size=page_size,
            pages_dtype=kv_format.dtype,
            soft_cap=attention.soft_cap is not None,
            sinks=attention.sinks is not None,
        )
        if not any(each.taken for each in choices if each.name != "reference"):
            portable = next(each for each in choices if each.name == "triton")
            raise InputError(
                f"attention over pages of {page_size} tokens, heads of {attention.head_dim}",
                f"plain torch would do it, which CUDA graphs cannot hold: triton {portable.reason}",
                "give --block-size 16, or --enforce-eager to run it slowly",
            )


def new_cache(
    attention: Attention, kv_format: KvFormat, shape: tuple[int, ...], device: torch.device
) -> PagedKv:
    """One layer's pages of `shape` [P, B, J, D], zeros."""
    keys, values = (torch.zeros(shape, dtype=kv_format.dtype, device=device) for _ in range(2))
    if not kv_format.is_coded:
        return PagedKv(k_pages=keys, v_pages=values)
    P, B, J, _ = shape
    if kv_format.static_scales:
        scales = [attention.k_scale, attention.v_scale]
        for scale in scales:
            if scale.numel() not in (1, J):
                raise CheckpointError(
                    f"{ATTENTION}.k_scale",
                    f"expected one scale, or one for each of {J} KV heads, found {scale.numel()}",
                    "calibrate again",
                )
        scales = [scale.expand(P, B, J) for scale in scales]
    else:  # the scales of one head stand together: a kernel reads them at once
        scales = [torch.zeros(P, J, B, device=device).transpose(1, 2) for _ in range(2)]
    return PagedKv(
        k_pages=keys,
        v_pages=values,
        k_scales=scales[0],
        v_scales=scales[1],
        static_scales=kv_format.static_scales,
    )


def _has_scales(decoder: Decoder) -> bool:
    """Whether the layers with keys and values have a k_scale and a v_scale: all or none."""
    attentions = {
        number: layer.attention
        for number, layer in enumerate(decoder.layers)
        if not isinstance(layer.attention, DeltaNet)
    }
    having = [
        attention.k_scale is not None and attention.v_scale is not None
        for attention in attentions.values()
    ]
    if any(having) and not all(having):
        raise CheckpointError(
            f"{decoder.config.family.layer.format(i=[*attentions][having.index(False)])}.{ATTENTION}",
            "expected a k_scale and a v_scale, as other layers have, found one or none",
            "calibrate again",
        )
    return all(having)
