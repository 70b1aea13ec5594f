"""A linear's input rounded to 8 bits, in Triton: one row for each program. Knows no weight.

Bit for bit what formats.activation.quantize_input makes on a CPU. A row is read in chunks, each a
tensor of its own, so that the loads of all of them are under way before the first is used. Legend:
M rows of x, K inputs.
"""

import torch
import triton
import triton.language as tl

from formats.activation import MIN_INPUT_SCALE
from formats.scheme import FP8_MAX, ActivationSpec
from qkernels.dependent_launch import start_early
from qkernels.launch import INTERPRETED, has_dependent_launch, launch, on_device, sm_count
from qkernels.tiles import ceil_div, power_of_two

# [smallest, largest] code; a dynamic scale is the row's largest magnitude over the largest code
CODE_RANGE = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-FP8_MAX, FP8_MAX)}
CODE_DTYPE = {"int": torch.int8, "float": torch.float8_e4m3fn}
NO_DEPENDENT_LAUNCH = {"EARLY": False, "SIGNAL_FIRST": False}


def row_warps(block: int) -> int:
    """16 channels for each thread, so that a lone row is read at once; 32 warps at most."""
    return min(32, max(1, block // 512))


def row_chunks(width: int, element_size: int) -> tuple[int, int, int]:
    """(channels of a chunk, chunks, warps) for a row: 8 channels of a chunk for each thread."""
    # us of 4096 rows of 14336: silu_and_mul_quantize 72, with 4096 and 16 warps 79, with 8192 and
    # 32 warps 114, with 1024 and 4 warps 74; quantize_input 43, 47, 49
    largest = 2048 if width * element_size <= 2**15 else 4096
    chunk = min(largest, max(256, power_of_two(width)))
    return chunk, ceil_div(width, chunk), chunk // 256


def dependent_launch(rows: int, width: int, device: torch.device) -> dict[str, bool]:
    """Launch arguments: EARLY and, with it, whether the next kernel starts before this one can.

    A product then copies its first weights while the kernel before both of them ends: rounding
    included, qkv at 256 rows takes 14.9 us, else 15.3; down at 1 row 18.7, else 19.4. But blocks
    that wait take the room of working ones: down at 64 rows 19.9, else 19.6, at 256 33.8 and 33.4.
    """
    if not has_dependent_launch(device):
        return NO_DEPENDENT_LAUNCH
    first = rows <= (2 * sm_count(device) if width <= 8192 else 16)
    return {"EARLY": True, "SIGNAL_FIRST": first, "launch_pdl": True}


def quantize_input(
    x_MK: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.quantize_input."""
    if activation.per == "group":
        return _quantize_groups_of(x_MK, activation)
    M, K = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    dtype = CODE_DTYPE[activation.type]
    smallest, largest = CODE_RANGE[dtype]
    codes_MK = torch.empty((M, K), dtype=dtype, device=x_MK.device)
    scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=x_MK.device)
    if M:
        chunk, chunks, warps = row_chunks(K, x_MK.element_size())
        with on_device(x_MK):
            launch(
                _quantize_rows,
                (M,),
                x_MK,
                None if activation.dynamic else scale,
                codes_MK,
                scales_M1,
                x_MK.stride(0),
                K,
                SMALLEST=smallest,
                LARGEST=largest,
                MIN_SCALE=MIN_INPUT_SCALE,
                CHUNK=chunk,
                CHUNKS=chunks,
                INTERPRETED=INTERPRETED,
                num_warps=warps,
                **dependent_launch(M, K, x_MK.device),
            )
    return codes_MK, scales_M1


def quantize_input_asymmetric(
    x_MK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ops.quantize_input_asymmetric."""
    M, K = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    codes_MK = torch.empty((M, K), dtype=torch.int8, device=x_MK.device)
    scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=x_MK.device)
    zeros_M1 = torch.empty((M, 1), dtype=torch.int32, device=x_MK.device)
    if M:
        chunk, chunks, warps = row_chunks(K, x_MK.element_size())
        with on_device(x_MK):
            launch(
                _quantize_rows_asymmetric,
                (M,),
                x_MK,
                codes_MK,
                scales_M1,
                zeros_M1,
                x_MK.stride(0),
                K,
                MIN_SCALE=MIN_INPUT_SCALE,
                CHUNK=chunk,
                CHUNKS=chunks,
                num_warps=warps,
                **dependent_launch(M, K, x_MK.device),
            )
    return codes_MK, scales_M1, zeros_M1


def _quantize_groups_of(
    x_MK: torch.Tensor, activation: ActivationSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each group of a row's inputs, which the group divides: scales [M, groups]."""
    M, K = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    dtype, size = CODE_DTYPE[activation.type], activation.group_size
    smallest, largest = CODE_RANGE[dtype]
    groups = K // size
    codes_MK = torch.empty((M, K), dtype=dtype, device=x_MK.device)
    scales_MS = torch.empty((M, groups), dtype=torch.float32, device=x_MK.device)
    if M:
        rows = max(1, 2048 // size)
        with on_device(x_MK):
            launch(
                _quantize_groups,
                (ceil_div(groups, rows), M),
                x_MK,
                codes_MK,
                scales_MS,
                x_MK.stride(0),
                groups,
                SIZE=size,
                ROWS=rows,
                SMALLEST=smallest,
                LARGEST=largest,
                MIN_SCALE=MIN_INPUT_SCALE,
                INTERPRETED=INTERPRETED,
                num_warps=8,
                **dependent_launch(M, K, x_MK.device),
            )
    return codes_MK, scales_MS


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in float32: in the order of the numbers, and NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr):
    """The float32 scale of a row from its magnitude bits: NaN where it has one, not to lose it."""
    magnitude = tl.max(bits, len(bits.shape) - 1).to(tl.float32, bitcast=True)
    return _scale_of_magnitude(magnitude, LARGEST, MIN_SCALE)


@triton.jit
def _scale_of_magnitude(magnitude, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr):
    # not `/`, which is off by a bit on a GPU
    scale = tl.div_rn(magnitude, tl.full(magnitude.shape, LARGEST, tl.float32))
    return tl.where(scale < MIN_SCALE, MIN_SCALE, scale)


@triton.jit
def scale_of_chunks(chunks, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr):
    """scale_of a row that is a tuple of chunks, before any of them becomes float32.

    Numbers of 16 bits are compared as they are, two in one instruction.
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
    """Values to codes of DTYPE: exact division in float32, clamped, rounded half to even.

    OWN_SCALE: the scale is that of scale_of, so no quotient is beyond the largest code.
    """
    SHORT: tl.constexpr = OWN_SCALE and x.dtype.primitive_bitwidth == 16
    FEW_BITS: tl.constexpr = OWN_SCALE and x.dtype.is_bf16()
    x = x.to(tl.float32)
    if INTERPRETED:
        scaled = tl.div_rn(x, tl.zeros_like(x) + scale)
    else:
        # Exact too, in 8 instructions of a number and not 40 (Markstein): the product with the
        # rounded inverse, corrected twice by the remainder, which a fused multiply-add has exactly.
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        if DTYPE.is_int8() and FEW_BITS:
            inverse = _inverse_for_codes(inverse, scale, LARGEST)
            return _to_int8(tl.fma(x, tl.zeros_like(x) + inverse, 12582912.0))
        inverse = tl.zeros_like(x) + inverse
        divisor = tl.zeros_like(x) - scale
        if not SHORT:
            # what is clamped here, so that no infinity arises, is beyond the largest code anyway
            limit = 512 * scale
            x = tl.minimum(tl.maximum(x, -limit), limit)
        scaled = x * inverse
        scaled = tl.fma(tl.fma(scaled, divisor, x), inverse, scaled)
        if not SHORT:
            # of 8 or 11 bits over a scale made of as many, one correction is enough: every pair of
            # them was tried (test_one_correction_is_exact)
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
    """The integer in x = integer + 1.5 * 2^23.

    A float32 of this size has no fraction left, so the addition rounded, half to even; and the
    lowest byte of its bits is the integer.
    """
    return x.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _inverse_for_codes(inverse, scale, LARGEST: tl.constexpr):
    """The float32 beside 1 / scale with which x * inverse, rounded once, is the code of bfloat16 x.

    Where the scale is that of the row's largest magnitude, only half of that lies between two
    codes, at 63.5. There x / scale, rounded to float32, decides, and the product must agree. No
    other x is near enough to be changed by the last bit of an inverse
    (test_one_product_makes_the_codes).
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
    """float32 to the nearest that float8_e4m3fn has, half to even.

    For Triton's interpreter alone: its own conversion drops a carry into the exponent.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # below 2^-6 the steps are 2^-9 each, as those of float32 above 2^14
    small = tl.abs((x + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(tl.abs(x) < 0.015625, small.to(tl.float32, bitcast=True), normal)


@triton.jit
def _quantize_rows(
    x_ptr,  # [M, K]
    scale_ptr,  # [] or None: dynamic
    codes_ptr,  # [M, K]
    scales_ptr,  # [M]
    stride_x,
    K,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
    SIGNAL_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    DYNAMIC: tl.constexpr = scale_ptr is None
    c = tl.arange(0, CHUNK)
    if EARLY:
        start_early(SIGNAL_FIRST)
    x = ()
    for i in tl.static_range(CHUNKS):
        k = i * CHUNK + c
        x = x + (tl.load(x_ptr + row * stride_x + k, mask=k < K, other=0.0),)
    scale = scale_of_chunks(x, LARGEST, MIN_SCALE) if DYNAMIC else tl.load(scale_ptr)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    for i in tl.static_range(CHUNKS):
        k = i * CHUNK + c
        codes = encode(x[i], scale, SMALLEST, LARGEST, DTYPE, DYNAMIC, INTERPRETED)
        tl.store(codes_ptr + row * K + k, codes, mask=k < K)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_groups(
    x_ptr,  # [M, groups * SIZE]
    codes_ptr,  # the same
    scales_ptr,  # [M, groups]
    stride_x,
    groups,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # groups of one program
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    EARLY: tl.constexpr,
    SIGNAL_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (group < groups)[:, None] & (k >= 0)
    if EARLY:
        start_early(SIGNAL_FIRST)
    x = tl.load(x_ptr + row * stride_x + k, mask=mask, other=0.0)
    scales = scale_of(magnitude_bits(x), LARGEST, MIN_SCALE)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    codes = encode(x, scales[:, None], SMALLEST, LARGEST, DTYPE, True, INTERPRETED)
    tl.store(codes_ptr + row * groups * SIZE + k, codes, mask=mask)
    tl.store(scales_ptr + row * groups + group, scales, mask=group < groups)


@triton.jit
def _round_half_even(x):
    """Of numbers below 2^22: from 1.5 * 2^23 on a float32 has no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize_rows_asymmetric(
    x_ptr,  # [M, K]
    codes_ptr,  # [M, K]
    scales_ptr,  # [M]
    zeros_ptr,  # [M]
    stride_x,
    K,
    MIN_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
    SIGNAL_FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNK)
    if EARLY:
        start_early(SIGNAL_FIRST)
    x = ()
    low = tl.zeros((CHUNK,), tl.float32)
    high = tl.zeros((CHUNK,), tl.float32)
    for i in tl.static_range(CHUNKS):
        k = i * CHUNK + c
        part = tl.load(x_ptr + row * stride_x + k, mask=k < K, other=0.0)
        x = x + (part,)
        part = part.to(tl.float32)
        low = tl.where(part < low, part, low)
        # a NaN must reach the scale, and the maximum of numbers may drop it
        high = tl.where((part > high) | (part != part), part, high)
    # as integers, non-negative floats are in their own order, and NaN is above infinity
    span = tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    least = tl.max((-low).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    levels = tl.full(span.shape, 255.0, tl.float32)
    scale = tl.div_rn(span + least, levels)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    zero = tl.minimum(tl.maximum(_round_half_even(tl.div_rn(least, scale) - 128), -128.0), 127.0)
    for i in tl.static_range(CHUNKS):
        k = i * CHUNK + c
        scaled = tl.div_rn(x[i].to(tl.float32), tl.zeros_like(low) + scale)
        scaled = tl.minimum(tl.maximum(_round_half_even(scaled) + zero, -128.0), 127.0)
        tl.store(codes_ptr + row * K + k, scaled.to(tl.int8), mask=k < K)
    tl.store(scales_ptr + row, scale)
    tl.store(zeros_ptr + row, zero.to(tl.int32))
