"""Triton device functions that convert inputs to int8 limbs (limbs.py) in registers and store them.

One index covers the words of all steps of a block. With separate indices for step and word, Triton
would assign neighboring lanes to neighboring steps. Legend: M rows, K inputs; BLOCK steps of 128
inputs.
"""

import triton
import triton.language as tl

from qkernels.operands.codes_triton import magnitude_bits
from qkernels.operands.split_k_triton import load_reduced


@triton.jit
def load_steps(row_ptr, first, steps, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Load BLOCK steps of a row from step `first` on, in the order of words: [BLOCK 32, 2, 2]."""
    ptrs, inside = _steps(row_ptr, first, steps, BLOCK, FORM)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def load_reduced_steps(
    row_ptr,
    stride_part,
    first,
    steps,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    SUM: tl.constexpr,
):
    """Load steps like load_steps, from a tensor or from split-K partial sums."""
    ptrs, inside = _steps(row_ptr, first, steps, BLOCK, FORM)
    return load_reduced(ptrs, inside, stride_part, SUM)


@triton.jit
def store_steps(row_ptr, values, first, steps, FORM: tl.constexpr):
    ptrs, inside = _steps(row_ptr, first, steps, values.shape[0] // 32, FORM)
    tl.store(ptrs, values, mask=inside)


@triton.jit
def _steps(row_ptr, first, steps, BLOCK: tl.constexpr, FORM: tl.constexpr):
    n = tl.arange(0, BLOCK * 32)
    i, w, t = n // 16 % 2, n // 4 % 4, n % 4
    if FORM.bits == 4:
        k = 64 * i + 32 * (w // 2) + 8 * (w % 2) + 2 * t
        apart = 16 * tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :]
    else:
        k = 64 * (t % 2) + 16 * w + 4 * i + 2 * (t // 2)
        apart = 8 * tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :]
    step = first + n // 32
    ptrs = row_ptr + (step * 128 + k)[:, None, None] + apart[None, :, :]
    return ptrs, (step < steps)[:, None, None] & (apart >= 0)[None, :, :]


@triton.jit
def in_words(values, FORM: tl.constexpr):
    """Reorder inputs [BLOCK, 128] to the order of words: [BLOCK 32, 2, 2]."""
    BLOCK: tl.constexpr = values.shape[0]
    if FORM.bits == 4:
        # [i, w / 2, byte % 2, w % 2, t, byte / 2]
        bits = values.reshape(BLOCK, 2, 2, 2, 2, 4, 2).trans(0, 1, 2, 4, 5, 3, 6)
    else:
        # [t % 2, w, byte % 2, i, t / 2, byte / 2]
        bits = values.reshape(BLOCK, 2, 4, 2, 2, 2, 2).trans(0, 4, 2, 5, 1, 3, 6)
    return bits.reshape(BLOCK * 32, 2, 2)


@triton.jit
def store_limbs(
    values,
    words_ptr,
    scales_ptr,
    sums_ptr,
    m,
    first,
    M,
    steps,
    FORM: tl.constexpr,
):
    """Convert 16-bit inputs [BLOCK 32, 2, 2] of row m to limbs and store them."""
    low, high = values.split()  # low: bytes 0 and 1 of words; high: bytes 2 and 3
    a, b = low.split()
    c, d = high.split()
    integers, scale = _integers((a, b, c, d))
    tiles = (M + 1) // 2
    n = tl.arange(0, integers[0].shape[0])
    lane = n % 32
    i, w, t = lane // 16, lane // 4 % 4, lane % 4
    step = first + n // 32
    place = (step * tiles + m // 2) * 256 + i * 128 + m * 4 % 8 * 16 + t * 4 + w
    words = _words(integers)
    own_step = first + tl.arange(0, scale.shape[0])
    own = (own_step * tiles + m // 2) * 8 + m * 4 % 8
    for limb in tl.static_range(4):
        tl.store(words_ptr + place + limb * 16, words[limb], mask=step < steps)
        tl.store(scales_ptr + own + limb, scale * 256.0**limb, mask=own_step < steps)
        if FORM.with_sums:
            tl.store(sums_ptr + own + limb, _sum_of_bytes(words[limb]), mask=own_step < steps)


@triton.jit
def _integers(values):
    """Return (integers whose bytes are signed limbs: four [BLOCK 32], scales [BLOCK]).

    Integers stay below 2^30, so no limb overflows. If the largest magnitude of a step is below
    2^-87, it counts as 2^-87, so that both powers of two are normal numbers.
    """
    largest = magnitude_bits(values[0])
    for j in tl.static_range(1, 4):
        largest = tl.maximum(largest, magnitude_bits(values[j]))
    BLOCK: tl.constexpr = largest.shape[0] // 32
    exponent = tl.maximum(tl.max(largest.reshape(BLOCK, 32), 1) >> 23, 40)
    factor = ((283 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    factor = factor.broadcast_to(BLOCK, 32).reshape(BLOCK * 32)
    scale = ((exponent - 29) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 255, float("nan"), scale)
    integers = ()
    for j in tl.static_range(4):
        integer = (values[j].to(tl.float32) * factor).to(tl.int32)
        integers = integers + ((integer + 0x00808080) ^ 0x00808080,)
    return integers, scale


@triton.jit
def _words(integers):
    """Return the four limbs of four integers: one word per limb, with one byte per integer."""
    words = ()
    for limb in tl.static_range(4):
        word = integers[0] >> 8 * limb & 255
        for j in tl.static_range(1, 4):
            word |= (integers[j] >> 8 * limb & 255) << 8 * j
        words = words + (word,)
    return words


@triton.jit
def _sum_of_bytes(word):
    """Add all signed bytes of each step: [BLOCK 32] to [BLOCK]."""
    sums = (word << 24 >> 24) + (word << 16 >> 24) + (word << 8 >> 24) + (word >> 24)
    return tl.sum(sums.reshape(word.shape[0] // 32, 32), 1)
