"""Encode weights as GGUF blocks. Codes and scales of a packed weight are kept unchanged.

Each function returns the bytes of rows [N, row bytes]. Legend: N outputs, K inputs, G groups, L
inputs of a group.
"""

import torch

from formats.errors import CheckpointError
from formats.gguf.block_types import BY_NAME, BlockType
from formats.gguf.schemes import BLOCK, BLOCK_SCHEMES
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight, round_to_nearest

# (bits, symmetric) of codes in groups of 32 -> type
INTEGER_TYPES = {
    (4, True): "Q4_0",
    (4, False): "Q4_1",
    (5, True): "Q5_0",
    (5, False): "Q5_1",
    (8, True): "Q8_0",
}
REMEDY = "quantize the float model with --format gguf"


def type_of(weight: Weight, name: str) -> BlockType:
    """Return the type that holds a weight exactly. Raises CheckpointError if there is none."""
    spec = weight.spec
    if isinstance(weight, KWeight):
        return weight.kind
    if getattr(weight, "activation", None) is not None:
        raise CheckpointError(name, "has 8-bit inputs, which GGUF does not state", REMEDY)
    if isinstance(weight, Fp4Weight) and spec.type == "mxfp4":
        return BY_NAME["MXFP4"]
    if not isinstance(weight, PackedWeight):
        raise CheckpointError(name, f"{weight.scheme} has no lossless form in GGUF", REMEDY)
    if spec.group_length(weight.in_features) % BLOCK:
        raise CheckpointError(
            name, f"{weight.scheme} has no lossless form in GGUF: its blocks have 32 inputs", REMEDY
        )
    if weight.input_order is not None:
        raise CheckpointError(name, "its inputs are reordered (act-order)", REMEDY)
    kind = INTEGER_TYPES.get((spec.bits, spec.symmetric))
    if kind is None:
        raise CheckpointError(name, f"{weight.scheme} has no lossless form in GGUF", REMEDY)
    return BY_NAME[kind]


def encode_weight(weight: Weight, name: str, *, exact: bool = True) -> torch.Tensor:
    """Return the rows of a packed weight, uint8 [N, row bytes].

    Raises CheckpointError, with `name`, if a scale or minimum is not a float16 number. With `exact`
    False, a minimum is rounded instead.
    """
    kind = type_of(weight, name)
    if isinstance(weight, KWeight):
        return weight.bytes_NX
    if isinstance(weight, Fp4Weight):
        return _mxfp4(weight)
    repeats = weight.spec.group_length(weight.in_features) // BLOCK
    scales_NB = _float16(weight.scales_NG, f"{name} scales").repeat_interleave(repeats, 1)
    codes_NBL = weight.codes().unflatten(1, (-1, BLOCK))
    parts = [_as_bytes(scales_NB)]
    if not weight.spec.symmetric:
        minima_NG = -weight.scales_NG.float() * weight.zeros_NG.float()
        minima_NG = _float16(minima_NG, f"{name} minima", exact=exact)
        parts.append(_as_bytes(minima_NG.repeat_interleave(repeats, 1)))
    if kind.name == "Q8_0":
        parts.append(codes_NBL ^ 128)
    elif weight.spec.bits == 5:
        parts += [_fifth_bits(codes_NBL), _nibbles(codes_NBL & 15)]
    else:
        parts.append(_nibbles(codes_NBL))
    return torch.cat(parts, -1).flatten(1)


def encode_floats(weight: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return the rows of a float tensor [N, K] as uint8 [N, row bytes].

    `kind` is a plain type, Q5_0, Q5_1, Q8_0 or a K-quant. Blocks are rounded to nearest.
    """
    if kind.float_dtype:
        stored = weight.to(getattr(torch, kind.float_dtype)).contiguous()
        return stored.reshape(-1, stored.shape[-1]).view(torch.uint8)
    if kind.name != "Q8_0":
        weight = round_to_nearest(weight, BLOCK_SCHEMES[kind.name.lower()].weight)
        return encode_weight(weight, "weight", exact=False)
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    step = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    codes = (blocks / step).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return torch.cat([scale.view(torch.uint8), codes], -1).flatten(-2).flatten(0, -2)


def _mxfp4(weight: Fp4Weight) -> torch.Tensor:
    """Reorder nibbles: in our form neighbors share a byte, in GGUF numbers 16 apart do."""
    codes = torch.stack([weight.bytes_NB & 15, weight.bytes_NB >> 4], -1).flatten(1)
    blocks = codes.unflatten(1, (-1, BLOCK))
    return torch.cat([weight.scales_NG[..., None], _nibbles(blocks)], -1).flatten(1)


def _fifth_bits(codes_NBL: torch.Tensor) -> torch.Tensor:
    """Pack the fifth bits of 32 codes into four bytes, the lowest bit first."""
    bits = (codes_NBL >> 4).unflatten(-1, (4, 8))
    return sum(bits[..., i] << i for i in range(8))


def _nibbles(codes_NBL: torch.Tensor) -> torch.Tensor:
    return codes_NBL[..., :16] | codes_NBL[..., 16:] << 4


def _as_bytes(values_NB: torch.Tensor) -> torch.Tensor:
    return values_NB.contiguous()[..., None].view(torch.uint8)


def _float16(values: torch.Tensor, name: str, *, exact: bool = True) -> torch.Tensor:
    stored = values.to(torch.float16)
    if not torch.isfinite(stored).all() or (exact and (stored.to(values.dtype) != values).any()):
        raise CheckpointError(name, "are not all float16 numbers, which GGUF stores", REMEDY)
    return stored


def to_bytes(rows: torch.Tensor) -> bytes:
    """Return the bytes of rows."""
    return rows.contiguous().numpy().tobytes()
