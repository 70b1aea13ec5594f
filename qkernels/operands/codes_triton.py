"""Triton device functions that round values in registers to 8-bit codes, int8 or float8."""

import torch
import triton
import triton.language as tl

from formats.numerics.activation import MIN_INPUT_SCALE
from formats.scheme import FP8_MAX, ActivationSpec
from qkernels.gpu.device import INTERPRETED
from qkernels.operands.codes import CODE_DTYPES, InputRounding

# (smallest, largest) code. A dynamic scale is the row's largest magnitude over the largest code.
CODE_RANGE = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-FP8_MAX, FP8_MAX)}


def empty_codes(
    M: int, C: int, activation: ActivationSpec, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate codes [M, C] and the scales [M, 1] of their rows."""
    codes_MC = torch.empty((M, C), dtype=CODE_DTYPES[activation.type], device=device)
    return codes_MC, torch.empty((M, 1), dtype=torch.float32, device=device)


def rounding_constants(rounding: InputRounding | None) -> dict[str, object]:
    """Return the compile-time constants of a kernel that rounds rows to codes.

    None: the kernel does not round, and the range of codes is 0.
    """
    smallest = largest = 0.0
    if rounding is not None:
        smallest, largest = CODE_RANGE[CODE_DTYPES[rounding.activation.type]]
    return {
        "SMALLEST": smallest,
        "LARGEST": largest,
        "MIN_SCALE": MIN_INPUT_SCALE,
        "INTERPRETED": INTERPRETED,
    }


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| in float32. They compare like the numbers, with NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr):
    """Return the float32 scale of a row from its magnitude bits. A NaN in the row gives NaN."""
    magnitude = tl.max(bits, len(bits.shape) - 1).to(tl.float32, bitcast=True)
    return _scale_of_magnitude(magnitude, LARGEST, MIN_SCALE)


@triton.jit
def _scale_of_magnitude(magnitude, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr):
    # div_rn, because `/` may be off by one bit on a GPU
    scale = tl.div_rn(magnitude, tl.full(magnitude.shape, LARGEST, tl.float32))
    return tl.where(scale < MIN_SCALE, MIN_SCALE, scale)


@triton.jit
def scale_of_chunks(chunks, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr):
    """Return scale_of for a row given as a tuple of chunks, without converting them to float32.

    16-bit numbers are compared directly, two in one instruction.
    """
    DTYPE: tl.constexpr = chunks[0].dtype
    SHORT: tl.constexpr = DTYPE.primitive_bitwidth == 16
    BITS: tl.constexpr = tl.int16 if SHORT else tl.int32
    ABSOLUTE: tl.constexpr = 0x7FFF if SHORT else 0x7FFFFFFF
    bits = chunks[0].to(BITS, bitcast=True) & ABSOLUTE
    for i in tl.static_range(1, len(chunks)):
        bits = tl.maximum(bits, chunks[i].to(BITS, bitcast=True) & ABSOLUTE)
    magnitude = tl.max(bits, 0).to(BITS).to(DTYPE, bitcast=True).to(tl.float32)
    return _scale_of_magnitude(magnitude, LARGEST, MIN_SCALE)


@triton.jit
def encode(
    x,
    scale,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    DTYPE: tl.constexpr,
    OWN_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Convert values to codes of DTYPE: exact division in float32, clamped, rounded half to even.

    OWN_SCALE: `scale` is scale_of these values, so no quotient exceeds the largest code.
    """
    SHORT: tl.constexpr = OWN_SCALE and x.dtype.primitive_bitwidth == 16
    FEW_BITS: tl.constexpr = OWN_SCALE and x.dtype.is_bf16()
    x = x.to(tl.float32)
    if INTERPRETED:
        scaled = tl.div_rn(x, tl.zeros_like(x) + scale)
    else:
        # Exact division in 8 instructions per number instead of 40 (Markstein): multiply by the
        # rounded inverse, then correct twice by the remainder, which fma computes exactly.
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        if DTYPE.is_int8() and FEW_BITS:
            inverse = _inverse_for_codes(inverse, scale, LARGEST)
            return _to_int8(tl.fma(x, tl.zeros_like(x) + inverse, 12582912.0))
        inverse = tl.zeros_like(x) + inverse
        divisor = tl.zeros_like(x) - scale
        if not SHORT:
            # prevents infinities; values beyond the limit exceed the largest code anyway
            limit = 512 * scale
            x = tl.minimum(tl.maximum(x, -limit), limit)
        scaled = x * inverse
        scaled = tl.fma(tl.fma(scaled, divisor, x), inverse, scaled)
        if not SHORT:
            # 16-bit floats with their own scale need only one correction: a test tries every pair
            # of significands (test_inverse_rounding_with_one_correction_is_exact)
            scaled = tl.fma(tl.fma(scaled, divisor, x), inverse, scaled)
    if INTERPRETED or not SHORT:
        scaled = tl.minimum(tl.maximum(scaled, SMALLEST), LARGEST)
    if DTYPE.is_int8():
        return _to_int8(scaled + 12582912.0)
    if INTERPRETED:
        scaled = _round_float8(scaled)
    return scaled.to(DTYPE)


@triton.jit
def _to_int8(x):
    """Return the integer n of x = n + 1.5 * 2^23.

    A float32 of this size has no fraction bits, so the addition rounded half to even, and the
    lowest byte is n.
    """
    return x.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _inverse_for_codes(inverse, scale, LARGEST: tl.constexpr):
    """Return the float32 near 1 / scale for which x * inverse, rounded once, is bfloat16 x's code.

    With the scale of the row's largest magnitude, only x = half of that magnitude is a tie between
    two codes, at 63.5. For this x the code follows from x / scale rounded to float32, and the
    product must give the same code. For every other x, the last bit of the inverse does not
    matter (test_codes_from_one_product_are_exact).
    """
    TIE: tl.constexpr = LARGEST / 2
    half = (scale * LARGEST).to(tl.bfloat16).to(tl.float32) * 0.5
    quotient = half * inverse
    quotient = tl.fma(tl.fma(-quotient, scale, half), inverse, quotient)
    rest = tl.fma(half, inverse, -TIE)
    too_low = (quotient >= TIE) & (rest < 0)
    too_high = (quotient < TIE) & (rest >= 0)
    bits = inverse.to(tl.int32, bitcast=True) + too_low.to(tl.int32) - too_high.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _round_float8(x):
    """Round float32 to the nearest value of float8_e4m3fn, half to even.

    Only for Triton's interpreter, whose own conversion loses a carry into the exponent.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # below 2^-6 the spacing is 2^-9, as in float32 above 2^14
    small = tl.abs((x + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(tl.abs(x) < 0.015625, small.to(tl.float32, bitcast=True), normal)
