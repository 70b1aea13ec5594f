"""16-bit inputs as 8-bit digits for the integer tensor core, in Triton. Knows no weight.

Up to four rows they are columns of an operand as registers want it (`digits_of`), more are rows of
one in shared memory (`digit_rows_of`).

The 128 inputs of a row and step become integers of 31 bits with one power of two as their scale:
exact where an input has its last bit above 2^-30 of the largest. Each integer is four signed
digits, the lowest first: x = scale * sum over d of digit_d 256^d.

Legend: M rows, K inputs, T tiles of 8 columns, each of two rows with four digits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qkernels.act_quant import magnitude_bits
from qkernels.dependent_launch import early, start_early
from qkernels.launch import launch, on_device, workspace
from qkernels.tiles import LINEAR_DIGITS, LINEAR_DIGITS_COLUMNS, LINEAR_MAX_BLOCK_K, ceil_div

STEPS_OF_BLOCK = 2
TILE_WORDS = LINEAR_MAX_BLOCK_K * LINEAR_DIGITS_COLUMNS // 4  # a step's tile, 4 digits in a word


class Digits(NamedTuple):
    """Digit d of row m is column (4 m + d) % 8 of tile m // 2. Columns beyond the rows: anything.

    A word has digits of four inputs, those that four bytes of the weight's words (w4a16.py) meet:

        4 bits: k = 64 i + 32 (w / 2) + 8 (w % 2) + 2 t + {0, 16, 1, 17}
        8 bits: k = 64 (t % 2) + 16 w + 4 i + 2 (t / 2) + {0, 8, 1, 9}
    """

    words: torch.Tensor  # int32 [K/128, T, 2 i, 8 columns, 4 t, 4 w]
    scales: torch.Tensor  # float32 [K/128, T, 8]: 256^d scale; NaN where x has one, or an inf
    sums: torch.Tensor | None  # int32 [K/128, T, 8]: of a column's digits


def digits_of(x_MK: torch.Tensor, bits: int, with_sums: bool) -> Digits:
    """x [M, K], contiguous, K divisible by 128, for a weight of `bits`.

    They lie in the device's workspace until its next use. The caller has asked
    tiles.linear_digits_fit.
    """
    M, K = x_MK.shape
    steps = K // LINEAR_MAX_BLOCK_K
    tiles = ceil_div(M * LINEAR_DIGITS, LINEAR_DIGITS_COLUMNS)
    shared, _ = workspace(x_MK.device)
    words, columns = steps * tiles * TILE_WORDS, steps * tiles * LINEAR_DIGITS_COLUMNS
    found = Digits(
        words=shared[:words].view(torch.int32).view(steps, tiles, TILE_WORDS),
        scales=shared[words : words + columns],
        sums=shared[words + columns : words + 2 * columns].view(torch.int32) if with_sums else None,
    )
    with on_device(x_MK):
        launch(
            _digits,
            (ceil_div(steps, STEPS_OF_BLOCK), M),
            x_MK,
            *found,
            K,
            steps,
            tiles,
            BITS=bits,
            D=LINEAR_DIGITS,
            COLUMNS=LINEAR_DIGITS_COLUMNS,
            STEP=LINEAR_MAX_BLOCK_K,
            BLOCK=STEPS_OF_BLOCK,
            num_warps=1,
            **early(x_MK, M),
        )
    return found


class DigitRows(NamedTuple):
    """Digits of R rows, for words of 4 bits: inputs in the order of w4a16_digits_ring.py.

    Word 16 i + 4 w + t has the inputs of word (i, w, t) of `Digits`. Rows beyond x: anything.
    """

    words: torch.Tensor  # int32 [K/128, 4 digits, R, 32]
    facts: torch.Tensor  # float32 [K/128, 4, R]: scale; low, high sums (int32); nothing
    free: torch.Tensor  # what is left of the workspace


def digit_rows_of(x_MK: torch.Tensor, R: int, with_sums: bool) -> DigitRows:
    """x [M, K], contiguous, K divisible by 128, of at most R rows.

    A sum is of the inputs' low or high two digits, in units of the first. They lie in the device's
    workspace until its next use. The caller has asked LinearRingTile.fits.
    """
    M, K = x_MK.shape
    steps = K // LINEAR_MAX_BLOCK_K
    shared, _ = workspace(x_MK.device)
    words, facts = steps * R * LINEAR_MAX_BLOCK_K, steps * R * 4
    found = DigitRows(
        words=shared[:words].view(torch.int32).view(steps, 4, R, 32),
        facts=shared[words : words + facts].view(steps, 4, R),
        free=shared[words + facts :],
    )
    with on_device(x_MK):
        launch(
            _digit_rows,
            (ceil_div(steps, STEPS_OF_BLOCK), M),
            x_MK,
            found.words,
            found.facts,
            K,
            steps,
            R=R,
            SUMS=with_sums,
            STEP=LINEAR_MAX_BLOCK_K,
            BLOCK=STEPS_OF_BLOCK,
            num_warps=1,
            **early(x_MK, M),
        )
    return found


@triton.jit
def _balanced(x, factor):
    """x * factor as an integer, each byte of it a signed digit."""
    return ((x * factor).to(tl.int32) + 0x00808080) ^ 0x00808080


@triton.jit
def _integers(
    x_ptr,
    K,
    steps,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The block's BLOCK steps of its row: (row, steps [BLOCK], a, b, c, d, scales [BLOCK]).

    Lane (i, w, t) has a word's four inputs, a to d [BLOCK, 32] as balanced integers below 2^30, so
    that no digit overflows. Both powers of two are normal numbers: what is below 2^-87 counts as if
    it were that large.
    """
    m = tl.program_id(1)
    step = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, STEP // 4)
    i, w, t = lane // 16, lane // 4 % 4, lane % 4
    if BITS == 4:
        k = 64 * i + 32 * (w // 2) + 8 * (w % 2) + 2 * t
    else:
        k = 64 * (t % 2) + 16 * w + 4 * i + 2 * (t // 2)
    APART: tl.constexpr = 16 if BITS == 4 else 8
    inside = (step < steps)[:, None]
    ptrs = x_ptr + m.to(tl.int64) * K + step[:, None] * STEP + k[None, :]
    if EARLY:
        start_early()
    a = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(ptrs + APART, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(ptrs + 1, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(ptrs + APART + 1, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(
        tl.maximum(magnitude_bits(a), magnitude_bits(b)),
        tl.maximum(magnitude_bits(c), magnitude_bits(d)),
    )
    exponent = tl.maximum(tl.max(largest, 1) >> 23, 40)
    factor = ((283 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    scale = ((exponent - 29) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 255, float("nan"), scale)
    a, b = _balanced(a, factor), _balanced(b, factor)
    return m, step, a, b, _balanced(c, factor), _balanced(d, factor), scale


@triton.jit
def _word(a, b, c, d, digit: tl.constexpr):
    """One digit of four integers, a byte each."""
    shift: tl.constexpr = 8 * digit
    word = (a >> shift & 255) | (b >> shift & 255) << 8
    return word | (c >> shift & 255) << 16 | (d >> shift & 255) << 24


@triton.jit
def _sum_of_bytes(word):
    """Of all signed bytes [BLOCK, 32] of a step."""
    return tl.sum((word << 24 >> 24) + (word << 16 >> 24) + (word << 8 >> 24) + (word >> 24), 1)


@triton.jit
def _digits(
    x_ptr,  # [M, K]
    words_ptr,  # [steps, T, 2, 8, 4, 4]
    scales_ptr,  # [steps, T, 8]
    sums_ptr,  # [steps, T, 8] or None
    K,
    steps,
    tiles,
    BITS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Digits of BLOCK steps of one row."""
    m, step, a, b, c, d, scale = _integers(x_ptr, K, steps, BITS, STEP, BLOCK, EARLY)
    inside = step < steps
    lane = tl.arange(0, STEP // 4)  # as in _integers
    i, w, t = lane // 16, lane // 4 % 4, lane % 4
    place = (i * (4 * COLUMNS) + t) * 4 + w
    of_step = step * tiles + m * D // COLUMNS
    for digit in tl.static_range(D):
        word = _word(a, b, c, d, digit)
        column = m * D % COLUMNS + digit
        at = of_step[:, None] * (STEP * COLUMNS // 4) + place[None, :] + column * 16
        tl.store(words_ptr + at, word, mask=inside[:, None])
        at = of_step * COLUMNS + column
        tl.store(scales_ptr + at, scale * 256.0**digit, mask=inside)
        if sums_ptr is not None:
            tl.store(sums_ptr + at, _sum_of_bytes(word), mask=inside)


@triton.jit
def _digit_rows(
    x_ptr,  # [M, K]
    words_ptr,  # [steps, 4, R, 32]
    facts_ptr,  # [steps, 4, R]
    K,
    steps,
    R: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Digits of BLOCK steps of one row."""
    m, step, a, b, c, d, scale = _integers(x_ptr, K, steps, 4, STEP, BLOCK, EARLY)
    inside = step < steps
    lane = tl.arange(0, STEP // 4)
    words_ptrs = words_ptr + (step * (4 * R) + m)[:, None] * (STEP // 4) + lane[None, :]
    facts_ptrs = facts_ptr + step * (4 * R) + m
    tl.store(facts_ptrs, scale, mask=inside)
    for pair in tl.static_range(2):
        low, high = _word(a, b, c, d, 2 * pair), _word(a, b, c, d, 2 * pair + 1)
        tl.store(words_ptrs + 2 * pair * R * (STEP // 4), low, mask=inside[:, None])
        tl.store(words_ptrs + (2 * pair + 1) * R * (STEP // 4), high, mask=inside[:, None])
        if SUMS:
            both = _sum_of_bytes(low) + (_sum_of_bytes(high) << 8)
            tl.store(facts_ptrs + (1 + pair) * R, both.to(tl.float32, bitcast=True), mask=inside)
