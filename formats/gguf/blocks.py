"""Decode blocks of each GGUF type to float32, bit for bit as gguf-py does.

A decoder takes the bytes of blocks [B, bytes] and returns their weights [B, length]. d, m and dmin
are float16; q is a code. formats/README.md describes the layouts. Legend: B blocks.
"""

from collections.abc import Callable

import torch

from formats.gguf.block_types import BlockType
from formats.in_memory.fp4 import MAGNITUDES

# values of the codes of IQ4_NL and IQ4_XS
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# twice the values of the codes of MXFP4, as whole numbers
FP4_DOUBLES = tuple(int(2 * m) for m in MAGNITUDES) + tuple(int(-2 * m) for m in MAGNITUDES)


def half(data_BX: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at byte `at` of each block, as float32 [B, 1]."""
    return data_BX[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(bytes_BX: torch.Tensor) -> torch.Tensor:
    """Return the low four bits of all bytes, then the high four bits: [B, 2 X]."""
    return torch.cat([bytes_BX & 15, bytes_BX >> 4], -1)


def q5_codes(data_BX: torch.Tensor, at: int) -> torch.Tensor:
    """Return the 5-bit codes [B, 32] at byte `at` of each block: 32 fifth bits, then 16 bytes."""
    low = nibbles(data_BX[:, at + 4 : at + 20])
    return low | _bits(data_BX[:, at : at + 4]) << 4


def _bits(bytes_BX: torch.Tensor) -> torch.Tensor:
    """Return the bits of bytes [B, X], lowest first: [B, 8 X]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bytes_BX.device)
    return ((bytes_BX[..., None] >> shifts) & 1).flatten(1)


def _fields(bytes_BX: torch.Tensor, bits: int) -> torch.Tensor:
    """Return fields of `bits` bits, first the lowest field of all bytes: [B, 8 / bits, X]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=bytes_BX.device)[:, None]
    return (bytes_BX[:, None, :] >> shifts) & (2**bits - 1)


def _q4_0(data_BX: torch.Tensor) -> torch.Tensor:
    return half(data_BX, 0) * (nibbles(data_BX[:, 2:]).float() - 8)


def _q4_1(data_BX: torch.Tensor) -> torch.Tensor:
    return half(data_BX, 0) * nibbles(data_BX[:, 4:]).float() + half(data_BX, 2)


def _q5_0(data_BX: torch.Tensor) -> torch.Tensor:
    return half(data_BX, 0) * (q5_codes(data_BX, 2).float() - 16)


def _q5_1(data_BX: torch.Tensor) -> torch.Tensor:
    return half(data_BX, 0) * q5_codes(data_BX, 4).float() + half(data_BX, 2)


def _q8_0(data_BX: torch.Tensor) -> torch.Tensor:
    return half(data_BX, 0) * data_BX[:, 2:].view(torch.int8).float()


def q2_codes(codes_B64: torch.Tensor) -> torch.Tensor:
    """Return the 2-bit codes of Q2_K, and the low bits of Q3_K's codes: uint8 [B, 256].

    32 bytes hold 128 codes; each pair of bits of the bytes holds 32 of them.
    """
    return torch.cat([_fields(part, 2).flatten(1) for part in codes_B64.split(32, 1)], 1)


def _q2_k(data_BX: torch.Tensor) -> torch.Tensor:
    scales, q = data_BX[:, :16], q2_codes(data_BX[:, 16:80])
    d, dmin = half(data_BX, 80), half(data_BX, 82)
    scale, low = d * (scales & 15).float(), dmin * (scales >> 4).float()
    return _scaled(q.float(), scale) - low.repeat_interleave(16, 1)


def q3_codes(data_BX: torch.Tensor) -> torch.Tensor:
    """Return the 3-bit codes of Q3_K, whose value 0 is code 4: uint8 [B, 256]."""
    return q2_codes(data_BX[:, 32:96]) | _fields(data_BX[:, :32], 1).flatten(1) << 2


def q3_scales(data_BX: torch.Tensor) -> torch.Tensor:
    """Return the sixteen scales of Q3_K, int8 [B, 16], from -32 to 31."""
    packed = data_BX[:, 96:108]
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    return (low | _fields(packed[:, 8:], 2).flatten(1) << 4).to(torch.int8) - 32


def _q3_k(data_BX: torch.Tensor) -> torch.Tensor:
    scales = half(data_BX, 108) * q3_scales(data_BX).float()
    return _scaled(q3_codes(data_BX).float() - 4, scales)


def k_scales(packed_B12: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight 6-bit scales and minima of Q4_K and Q5_K, uint8 [B, 8] each."""
    first, second, last = packed_B12.split(4, 1)
    scale = torch.cat([first & 63, (last & 15) | (first >> 6) << 4], 1)
    low = torch.cat([second & 63, (last >> 4) | (second >> 6) << 4], 1)
    return scale, low


def _q4_k(data_BX: torch.Tensor) -> torch.Tensor:
    q = torch.cat([nibbles(part) for part in data_BX[:, 16:].split(32, 1)], 1)
    return _with_minima(q, data_BX)


def q5_k_codes(data_BX: torch.Tensor) -> torch.Tensor:
    """Return the 5-bit codes of Q5_K, uint8 [B, 256]."""
    low = torch.cat([nibbles(part) for part in data_BX[:, 48:].split(32, 1)], 1)
    return low | _fields(data_BX[:, 16:48], 1).flatten(1) << 4


def _q5_k(data_BX: torch.Tensor) -> torch.Tensor:
    return _with_minima(q5_k_codes(data_BX), data_BX)


def _with_minima(q: torch.Tensor, data_BX: torch.Tensor) -> torch.Tensor:
    scale, low = k_scales(data_BX[:, 4:16])
    d, dmin = half(data_BX, 0) * scale.float(), half(data_BX, 2) * low.float()
    return _scaled(q.float(), d) - dmin.repeat_interleave(32, 1)


def q6_codes(data_BX: torch.Tensor) -> torch.Tensor:
    """Return the 6-bit codes of Q6_K, uint8 [B, 256]."""
    parts = []
    for i in range(2):
        low = nibbles(data_BX[:, 64 * i : 64 * i + 64])
        high = _fields(data_BX[:, 128 + 32 * i : 160 + 32 * i], 2).flatten(1)
        parts.append(low | high << 4)
    return torch.cat(parts, 1)


def _q6_k(data_BX: torch.Tensor) -> torch.Tensor:
    scales = data_BX[:, 192:208].view(torch.int8).float()
    return _scaled(q6_codes(data_BX).float() - 32, half(data_BX, 208) * scales)


def _iq4_nl(data_BX: torch.Tensor) -> torch.Tensor:
    return half(data_BX, 0) * iq4_values(nibbles(data_BX[:, 2:])).float()


def iq4_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of 4-bit codes of IQ4_NL and IQ4_XS, int16."""
    return torch.tensor(IQ4_VALUES, dtype=torch.int16, device=codes.device)[codes.int()]


def iq4_xs_values(data_BX: torch.Tensor) -> torch.Tensor:
    """Return the values of the codes of IQ4_XS, int16 [B, 256]."""
    codes = torch.cat([nibbles(part) for part in data_BX[:, 8:].split(16, 1)], 1)
    return iq4_values(codes)


def iq4_xs_scales(data_BX: torch.Tensor) -> torch.Tensor:
    """Return the eight scales of IQ4_XS, int8 [B, 8], from -32 to 31."""
    high = _fields_of_word(data_BX[:, 2:4])
    low = torch.stack([data_BX[:, 4:8] & 15, data_BX[:, 4:8] >> 4], -1).flatten(1)
    return (low | high << 4).to(torch.int8) - 32


def _iq4_xs(data_BX: torch.Tensor) -> torch.Tensor:
    scales = half(data_BX, 0) * iq4_xs_scales(data_BX).float()
    return _scaled(iq4_xs_values(data_BX).float(), scales)


def _fields_of_word(bytes_B2: torch.Tensor) -> torch.Tensor:
    """Return the eight 2-bit fields of a 16-bit word, lowest first: uint8 [B, 8]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=bytes_B2.device)
    return ((bytes_B2[..., None] >> shifts) & 3).flatten(1)


def _mxfp4(data_BX: torch.Tensor) -> torch.Tensor:
    exponent = data_BX[:, :1].to(torch.int32)
    # 2^(exponent - 128) as the bits of a float32, subnormal below 2
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=2), (exponent - 1) << 23)
    doubles = torch.tensor(FP4_DOUBLES, dtype=torch.float32)[nibbles(data_BX[:, 1:]).int()]
    return bits.view(torch.float32) * doubles


def _scaled(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes [B, length] times the scales [B, groups] of their groups."""
    return (q.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def decode_rows(data: torch.Tensor, kind: BlockType, in_features: int) -> torch.Tensor:
    """Return the weights [rows, in_features] of a run of bytes, in float32 or the plain dtype."""
    if kind.float_dtype:
        return data.view(getattr(torch, kind.float_dtype)).reshape(-1, in_features)
    return DECODERS[kind.name](data.reshape(-1, kind.num_bytes)).reshape(-1, in_features)
