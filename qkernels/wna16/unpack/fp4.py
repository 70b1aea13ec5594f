"""Triton device functions that unpack 4-bit floats to weights; fp4_layout.py defines the layout.

On NVIDIA GPUs USE_PTX enables a piece of inline PTX; the weights are the same without it. Legend: N
outputs, K inputs; BN, BK the tile; WORDS of a row and a K step.
"""

import triton
import triton.language as tl

from qkernels.wna16.unpack.words import in_order, pairs_in_order, unpack_x2


@triton.jit
def _scales_of_words(scale_bytes, FP4: tl.constexpr, BK: tl.constexpr):
    """Convert rows' scale bytes [BN] to a word for each packed word: the 16-bit scale twice."""
    word = tl.arange(0, BK // 8)
    byte = (scale_bytes[:, None] >> (8 * (word % (BK // 32)))[None, :]) & 0xFF
    return byte * FP4.scale_factor + FP4.scale_addend


@triton.jit
def _step_scales(
    scales_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    FP4: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Return the scales [BN, WORDS] of each word's first 16 inputs, and of its other inputs."""
    row = (stored_tile * steps + step) * TILE_N + stored_row
    first = _scales_of_words(tl.load(scales_ptr + row * FP4.parts).to(tl.int32), FP4, BK)
    second = first
    if FP4.parts == 2:
        second = _scales_of_words(tl.load(scales_ptr + row * 2 + 1).to(tl.int32), FP4, BK)
    return first, second


@triton.jit
def _numbers(packed, LEFT: tl.constexpr, SIGN_LEFT: tl.constexpr, FP4: tl.constexpr):
    """Return two numbers of each word, as 16-bit floats times a power of two."""
    SHIFT: tl.constexpr = LEFT + FP4.to_field
    shifted = packed << SHIFT if SHIFT >= 0 else packed >> -SHIFT
    # -0x7FFF8000: both sign bits
    return (shifted & FP4.field_mask) | ((packed << SIGN_LEFT) & -0x7FFF8000)


@triton.jit
def _scaled(numbers, scales, DTYPE: tl.constexpr):
    """Multiply 16-bit floats [BN, WORDS, 2] by their scales, rounding once."""
    products = unpack_x2(numbers, DTYPE).to(tl.float32) * unpack_x2(scales, DTYPE).to(tl.float32)
    return products.to(DTYPE)


@triton.jit
def fp4_weights(
    packed,
    scales_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    FP4: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Convert packed words [BN, WORDS] of a K step to weights [BN, BK], without output factors."""
    first, second = _step_scales(scales_ptr, stored_tile, stored_row, step, steps, FP4, BK, TILE_N)
    if USE_PTX:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            FP4.ptx,
            FP4.outputs,
            [packed, first, second],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            True,
            1,
        )
        return in_order(p0, p1, p2, p3, BN, BK, DTYPE)
    else:
        v0 = _scaled(_numbers(packed, 0, 0, FP4), first, DTYPE)
        v1 = _scaled(_numbers(packed, 3, 3, FP4), first, DTYPE)
        v2 = _scaled(_numbers(packed, 6, 2, FP4), second, DTYPE)
        v3 = _scaled(_numbers(packed, -3, 1, FP4), second, DTYPE)
        return pairs_in_order(v0, v1, v2, v3, BN, BK)


@triton.jit
def _dequantized(numbers, scales, factor, FP4: tl.constexpr, DTYPE: tl.constexpr):
    """Return weights [BN, WORDS, 2] in float32, rounded like Fp4Weight.dequantize."""
    scale = unpack_x2(scales, DTYPE).to(tl.float32) * (1 / FP4.number_factor)
    number = unpack_x2(numbers, DTYPE).to(tl.float32) * FP4.number_factor
    return number * (scale * factor[:, None, None])


@triton.jit
def fp4_dequantized(
    packed,
    scales_ptr,
    factors_ptr,
    stored_tile,
    stored_row,
    step,
    steps,
    FP4: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE_N: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Convert packed words [BN, WORDS] of a K step to weights [BN, BK] in float32."""
    first, second = _step_scales(scales_ptr, stored_tile, stored_row, step, steps, FP4, BK, TILE_N)
    factor = tl.load(factors_ptr + stored_tile * TILE_N + stored_row)
    v0 = _dequantized(_numbers(packed, 0, 0, FP4), first, factor, FP4, DTYPE)
    v1 = _dequantized(_numbers(packed, 3, 3, FP4), first, factor, FP4, DTYPE)
    v2 = _dequantized(_numbers(packed, 6, 2, FP4), second, factor, FP4, DTYPE)
    v3 = _dequantized(_numbers(packed, -3, 1, FP4), second, factor, FP4, DTYPE)
    return pairs_in_order(v0, v1, v2, v3, BN, BK)


@triton.jit
def prefetch_scales(
    scales_ptr, tile, first, last, steps, FP4: tl.constexpr, TILE_N: tl.constexpr, BN: tl.constexpr
):
    """Prefetch the 128-byte lines of a block's scales into the L2, for up to 128 K steps."""
    VALUES: tl.constexpr = FP4.parts * TILE_N  # scale words per K step
    LINE: tl.constexpr = 1024 // scales_ptr.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(BN // TILE_N):
        for line in tl.static_range((VALUES + LINE - 1) // LINE):
            step = tl.minimum(first + tl.arange(0, 128), last - 1)
            ptrs = scales_ptr + ((tile * (BN // TILE_N) + i) * steps + step) * VALUES + line * LINE
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1
            )
