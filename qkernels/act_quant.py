"""A linear's input rounded to 8 bits, in Triton: one row for each program. Knows no weight.

Bit for bit what formats.activation.quantize_input makes on a CPU. Legend: M rows of x, K inputs.
"""

import torch
import triton
import triton.language as tl

from formats.activation import MIN_INPUT_SCALE
from formats.scheme import FP8_MAX, ActivationSpec
from qkernels.launch import INTERPRETED, has_dependent_launch, on_device
from qkernels.tiles import power_of_two

# [smallest, largest] code; a dynamic scale is the row's largest magnitude over the largest code
CODE_RANGE = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-FP8_MAX, FP8_MAX)}
CODE_DTYPE = {"int": torch.int8, "float": torch.float8_e4m3fn}


def row_warps(block: int) -> int:
    """16 channels for each thread, so that a lone row is read at once; 32 warps at most."""
    return min(32, max(1, block // 512))


def quantize_input(
    x_MK: torch.Tensor, activation: ActivationSpec, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.quantize_input."""
    M, K = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    dtype = CODE_DTYPE[activation.type]
    smallest, largest = CODE_RANGE[dtype]
    codes_MK = torch.empty((M, K), dtype=dtype, device=x_MK.device)
    scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=x_MK.device)
    if M:
        block = power_of_two(K)
        early = has_dependent_launch(x_MK.device)
        with on_device(x_MK):
            _quantize_rows[(M,)](
                x_MK,
                None if activation.dynamic else scale,
                codes_MK,
                scales_M1,
                x_MK.stride(0),
                K,
                SMALLEST=smallest,
                LARGEST=largest,
                MIN_SCALE=MIN_INPUT_SCALE,
                BLOCK=block,
                EARLY=early,
                INTERPRETED=INTERPRETED,
                num_warps=row_warps(block),
                **({"launch_pdl": True} if early else {}),
            )
    return codes_MK, scales_M1


@triton.jit
def row_scale(x, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr):
    """The float32 scale of each float32 row: NaN where it has one, so that it is not lost."""
    # as integers, the bits of magnitudes are in the same order, and NaN is above infinity
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.max(bits, -1).to(tl.float32, bitcast=True)
    # not `/`, which is off by a bit on a GPU
    scale = tl.div_rn(magnitude, tl.full(magnitude.shape, LARGEST, tl.float32))
    return tl.where(scale < MIN_SCALE, MIN_SCALE, scale)


@triton.jit
def encode(
    x,
    scale,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """float32 values to codes of DTYPE: exact division, clamped, rounded half to even."""
    if INTERPRETED:
        scaled = tl.div_rn(x, tl.zeros_like(x) + scale)
    else:
        # Exact too, in 8 instructions of a number and not 40 (Markstein): the product with the
        # rounded inverse, corrected twice by the remainder, which a fused multiply-add has exactly.
        # What is clamped first, so that no infinity arises, is beyond the largest code anyway.
        inverse = tl.zeros_like(x) + tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        limit = 512 * scale
        x = tl.minimum(tl.maximum(x, -limit), limit)
        divisor = tl.zeros_like(x) - scale
        scaled = x * inverse
        scaled = tl.fma(tl.fma(scaled, divisor, x), inverse, scaled)
        scaled = tl.fma(tl.fma(scaled, divisor, x), inverse, scaled)
    scaled = tl.minimum(tl.maximum(scaled, SMALLEST), LARGEST)
    if DTYPE.is_int8():
        # 1.5 * 2^23: a float32 of this size has no fraction left, adding rounds half to even, and
        # the lowest byte of its bits is the integer
        return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    if INTERPRETED:
        scaled = _round_float8(scaled)
    return scaled.to(DTYPE)


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
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # the product after this one may start to fetch its weight
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    scale = row_scale(x, LARGEST, MIN_SCALE) if scale_ptr is None else tl.load(scale_ptr)
    codes = encode(x, scale, SMALLEST, LARGEST, codes_ptr.dtype.element_ty, INTERPRETED)
    tl.store(codes_ptr + row * K + k, codes, mask=k < K)
    tl.store(scales_ptr + row, scale)
