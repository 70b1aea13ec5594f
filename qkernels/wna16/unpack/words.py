"""Triton device functions that unpack words of codes to 16-bit values.

On NVIDIA GPUs USE_PTX enables a piece of inline PTX; the results are the same without it. Legend: N
outputs, K inputs; BN, BK the tile; WORDS of a row and a K step.
"""

import torch
import triton
import triton.language as tl

# A code q or-ed into the low bits of each half of this word gives exactly 1024 + q in float16 (ten
# mantissa bits) and 128 + q in bfloat16 (seven). bfloat16 has no room for 8-bit codes: their two
# nibbles are combined to q - 128.
MAGIC_WORD = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}


@triton.jit
def _or_into_magic(packed, MAGIC: tl.constexpr, USE_PTX: tl.constexpr):
    """Return the codes at bits 0 and 16 of each word, or-ed into the magic number.

    The PTX is one instruction. The compiler needs two, because an instruction has room for only one
    constant: 27 instructions more than the 217 of a 64 x 128 tile.
    """
    if not USE_PTX:
        return (packed & 0x000F000F) | MAGIC
    magic = tl.full(packed.shape, MAGIC, tl.int32)
    # 0xEA: (a & b) | c
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;", "=r,r,r", [packed, magic], tl.int32, True, 1
    )


@triton.jit
def unpack_x2(words, DTYPE: tl.constexpr):
    """Return both 16-bit values of each word: [..., 2]."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _unpack_bytes(packed, MAGIC: tl.constexpr, DTYPE: tl.constexpr, USE_PTX: tl.constexpr):
    """Return [..., 2]: the codes in bits 0..7 and 16..23 of each word, plus the value of code 0."""
    if DTYPE.is_fp16():
        return unpack_x2((packed & 0x00FF00FF) | MAGIC, DTYPE)
    # 16 (128 + high) - 2304 + (128 + low) = code - 128; no term needs more than bfloat16's 8 bits
    low = unpack_x2(_or_into_magic(packed, MAGIC, USE_PTX), DTYPE)
    high = unpack_x2(_or_into_magic(packed >> 4, MAGIC, USE_PTX), DTYPE)
    return (high * 16.0 - 2304.0).to(DTYPE) + low


@triton.jit
def unpack(
    packed,
    MAGIC: tl.constexpr,
    BITS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Convert packed words [BN, WORDS] to codes plus the value of code 0, [BN, BK].

    Each value stays in its thread.
    """
    if BITS == 8:
        e0 = _unpack_bytes(packed, MAGIC, DTYPE, USE_PTX)
        e1 = _unpack_bytes(packed >> 8, MAGIC, DTYPE, USE_PTX)
        # [BN, t, BK/16, e, h] -> [BN, BK/16, h, t, e]
        values = tl.join(e0, e1).reshape(BN, 4, BK // 16, 2, 2)
        return values.trans(0, 2, 4, 1, 3).reshape(BN, BK)
    else:
        p0 = _or_into_magic(packed, MAGIC, USE_PTX)
        p1 = _or_into_magic(packed >> 4, MAGIC, USE_PTX)
        p2 = _or_into_magic(packed >> 8, MAGIC, USE_PTX)
        p3 = _or_into_magic(packed >> 12, MAGIC, USE_PTX)
        return in_order(p0, p1, p2, p3, BN, BK, DTYPE)


@triton.jit
def in_order(p0, p1, p2, p3, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr):
    """Reorder pairs [BN, WORDS] of codes at bits 0, 4, 8, 12 to [BN, BK], in the inputs' order."""
    return pairs_in_order(
        unpack_x2(p0, DTYPE),
        unpack_x2(p1, DTYPE),
        unpack_x2(p2, DTYPE),
        unpack_x2(p3, DTYPE),
        BN,
        BK,
    )


@triton.jit
def pairs_in_order(v0, v1, v2, v3, BN: tl.constexpr, BK: tl.constexpr):
    """Reorder values [BN, WORDS, 2] like in_order."""
    i0, i1 = tl.join(v0, v1), tl.join(v2, v3)
    # [BN, t, BK/32, e, h, i] -> [BN, BK/32, i, h, t, e]
    values = tl.join(i0, i1).reshape(BN, 4, BK // 32, 2, 2, 2)
    return values.trans(0, 2, 5, 4, 1, 3).reshape(BN, BK)
