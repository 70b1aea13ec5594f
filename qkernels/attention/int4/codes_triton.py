"""Triton device functions for 4-bit codes of keys and values in registers; see codes.py."""

import triton
import triton.language as tl

from qkernels.attention.int4.codes import LARGEST_HALF, LEVELS, MIN_SCALE
from qkernels.operands.codes_triton import magnitude_bits

_LEVELS, _MIN_SCALE = tl.constexpr(float(LEVELS)), tl.constexpr(MIN_SCALE)
_LARGEST = tl.constexpr(LARGEST_HALF)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def rotate_rows(x, D: tl.constexpr):
    """Multiply rows [HEADS, D] by the Hadamard matrix of size D, divided by sqrt(D), in float32."""
    x = x.to(tl.float32)
    for power in tl.static_range(D.bit_length() - 1):
        x = _sums_and_differences(x, 2**power, D)
    return x * D**-0.5


@triton.jit
def _sums_and_differences(x, APART: tl.constexpr, D: tl.constexpr):
    """Replace the channels i and i + APART of each pair by their sum and their difference."""
    HEADS: tl.constexpr = x.shape[0]
    pairs = x.reshape(HEADS, D // (2 * APART), 2, APART).permute(0, 1, 3, 2)
    first, second = pairs.split()
    pairs = tl.join(first + second, first - second)
    return pairs.permute(0, 1, 3, 2).reshape(HEADS, D)


@triton.jit
def store_rows(x, rows, pairs, exists, GROUPS: tl.constexpr, D: tl.constexpr):
    """Round float32 rows [HEADS, D]; store bytes at `rows`, scales and zeros at `pairs`.

    `rows` and `pairs` are pointers [HEADS]; rows without `exists` are not stored. GROUPS, the
    number of groups in a row, is 2 for keys and 1 for values.
    """
    low, high = x.reshape(x.shape[0], 2, D // 2).permute(0, 2, 1).split()
    if GROUPS == 2:
        low = _coded(low, tl.min(low, 1), tl.max(low, 1), _magnitude(low), pairs, exists)
        high = _coded(high, tl.min(high, 1), tl.max(high, 1), _magnitude(high), pairs + 2, exists)
    else:
        lowest, highest, magnitude = tl.min(x, 1), tl.max(x, 1), _magnitude(x)
        low = _coded(low, lowest, highest, magnitude, pairs, exists)
        high = _coded(high, lowest, highest, magnitude, pairs, exists)
    byte = tl.arange(0, D // 2)
    tl.store(rows[:, None] + byte[None, :], (low | (high << 4)).to(tl.uint8), mask=exists[:, None])


@triton.jit
def _magnitude(x):
    """Return the bits of each row's largest magnitude; a NaN counts as larger than infinity."""
    return tl.max(magnitude_bits(x), 1)


@triton.jit
def _coded(x, lowest, highest, magnitude, pairs, exists):
    """Return code + 8 (int32) of rows that lie between `lowest` and `highest`.

    Stores scale and zero at `pairs`.
    """
    finite = magnitude < _INFINITY_BITS
    scale = tl.div_rn(highest - lowest, tl.full(lowest.shape, _LEVELS, tl.float32))
    scale = tl.minimum(tl.maximum(scale, _MIN_SCALE), _LARGEST)
    scale = tl.where(finite, scale, 1.0).to(tl.float16)
    zero = lowest + 8 * scale.to(tl.float32)
    zero = tl.where(finite, tl.minimum(tl.maximum(zero, -_LARGEST), _LARGEST), 0.0).to(tl.float16)
    tl.store(pairs, scale, mask=exists)
    tl.store(pairs + 1, tl.where(finite, zero, float("nan")), mask=exists)
    scaled = x - zero.to(tl.float32)[:, None]
    scaled = tl.div_rn(scaled, tl.zeros_like(x) + scale.to(tl.float32)[:, None])
    scaled = tl.minimum(tl.maximum(scaled, -8.0), 7.0)
    # A float32 of 1.5 * 2^23 has no fraction left: the addition rounded, half to even, and the low
    # bits are code + 8.
    return (scaled + 12582920.0).to(tl.int32, bitcast=True) & 15
