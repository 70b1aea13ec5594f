"""Triton kernels of `round_block` (solvers/gptq.py) and `descend_block` (solvers/refine.py).

These are the inner loops of GPTQ and of refinement; results equal those of the torch functions. A
program holds some outputs and all columns of the block in registers. In plain torch each column
takes nine launches, which a modern GPU finishes faster than the host can issue them.

Legend: B columns of a block, N outputs.
"""

import torch
import triton
import triton.language as tl

from formats.scheme import FP4_TYPES, K_TYPES, QuantSpec

OUTPUTS = 32  # per program
# Adding and then subtracting this number rounds to an integer, half to even as in torch.
ROUND = tl.constexpr(12582912.0)
# Quotients are clipped to this magnitude before rounding; larger ones exceed every code anyway.
FAR = tl.constexpr(1024.0)


def round_block(
    block_BN: torch.Tensor,
    scale_BN: torch.Tensor,
    zero_BN: torch.Tensor,
    upper_BB: torch.Tensor,
    spec: QuantSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a block of columns; return (codes, errors divided by pivots), float32.

    Unlike the torch function it does not overwrite `block_BN`.
    """
    columns, outputs = block_BN.shape
    codes_BN, errors_BN = torch.empty_like(block_BN), torch.empty_like(block_BN)
    _round_block[(triton.cdiv(outputs, OUTPUTS),)](
        block_BN,
        scale_BN,
        zero_BN,
        upper_BB,
        codes_BN,
        errors_BN,
        columns,
        outputs,
        *scale_BN.stride(),
        *zero_BN.stride(),
        *upper_BB.stride(),
        LAST=spec.max_code,
        MINIMA=spec.type in K_TYPES,
        FLOATS=spec.type in FP4_TYPES,
        B=triton.next_power_of_2(columns),
        N=OUTPUTS,
        num_warps=4,
    )
    return codes_BN, errors_BN


@triton.jit
def _round_block(
    block,
    scale,
    zero,
    upper,
    codes,
    errors,
    columns,
    outputs,
    scale_b,
    scale_n,
    zero_b,
    zero_n,
    upper_r,
    upper_c,
    LAST: tl.constexpr,
    MINIMA: tl.constexpr,
    FLOATS: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
):
    b = tl.arange(0, B)
    n = tl.program_id(0) * N + tl.arange(0, N)
    there = n < outputs
    cell = b[:, None] * outputs + n[None, :]
    open_BN = tl.load(block + cell, mask=(b < columns)[:, None] & there[None, :], other=0.0)
    for i in range(columns):
        x = tl.sum(tl.where((b == i)[:, None], open_BN, 0.0), axis=0)
        s = tl.load(scale + i * scale_b + n * scale_n, mask=there, other=1.0)
        z = tl.load(zero + i * zero_b + n * zero_n, mask=there, other=0.0)
        if MINIMA:  # z is the negated value of code 0; a group without a step has code 0
            code = tl.div_rn(x + z, tl.where(s == 0, 1.0, s))
            code = tl.minimum(tl.maximum(code, 0.0), LAST * 1.0)
            code = tl.where(s == 0, 0.0, (code + ROUND) - ROUND)
            value = code * s - z
        elif FLOATS:  # e2m1: half steps below 2, steps of 1 below 4, of 2 up to 6
            place = tl.div_rn(x, tl.where(s == 0, 1.0, s))
            size = tl.minimum(tl.abs(place), FAR)
            step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
            size = tl.minimum(((size / step + ROUND) - ROUND) * step, 6.0)
            code = tl.where(size < 2, 2 * size, tl.where(size < 4, size + 2, size / 2 + 4))
            is_negative = (place < 0) & (size > 0)
            code = tl.where(is_negative, code + 8, code)
            value = tl.where(is_negative, -size, size) * s
        else:
            code = tl.minimum(tl.maximum(tl.div_rn(x, s), -FAR), FAR)
            code = (code + ROUND) - ROUND
            code = tl.minimum(tl.maximum(code + z, 0.0), LAST * 1.0)
            value = (code - z) * s
        pivot = tl.load(upper + i * upper_r + i * upper_c)
        error = tl.div_rn(x - value, pivot)
        tl.store(codes + i * outputs + n, code, mask=there)
        tl.store(errors + i * outputs + n, error, mask=there)
        row = tl.load(upper + i * upper_r + b * upper_c, mask=(b > i) & (b < columns), other=0.0)
        open_BN -= row[:, None] * error[None, :]


def descend_block(
    slope_BN: torch.Tensor,
    own_BN: torch.Tensor,
    scale_BN: torch.Tensor,
    zero_BN: torch.Tensor,
    hessian_BB: torch.Tensor,
    spec: QuantSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the codes of a block of columns; return (codes, changes of the weights), float32."""
    columns, outputs = own_BN.shape
    codes_BN, moved_BN = torch.empty_like(own_BN), torch.empty_like(own_BN)
    _descend_block[(triton.cdiv(outputs, OUTPUTS),)](
        slope_BN,
        own_BN,
        scale_BN,
        zero_BN,
        hessian_BB,
        codes_BN,
        moved_BN,
        columns,
        outputs,
        *scale_BN.stride(),
        *zero_BN.stride(),
        *hessian_BB.stride(),
        LAST=spec.max_code,
        B=triton.next_power_of_2(columns),
        N=OUTPUTS,
        num_warps=4,
    )
    return codes_BN, moved_BN


@triton.jit
def _descend_block(
    slope,
    own,
    scale,
    zero,
    hessian,
    codes,
    moved,
    columns,
    outputs,
    scale_b,
    scale_n,
    zero_b,
    zero_n,
    hessian_r,
    hessian_c,
    LAST: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
):
    b = tl.arange(0, B)
    n = tl.program_id(0) * N + tl.arange(0, N)
    there = n < outputs
    cell = b[:, None] * outputs + n[None, :]
    slope_BN = tl.load(slope + cell, mask=(b < columns)[:, None] & there[None, :], other=0.0)
    for i in range(columns):
        x = tl.load(own + i * outputs + n, mask=there, other=0.0)
        s = tl.load(scale + i * scale_b + n * scale_n, mask=there, other=1.0)
        z = tl.load(zero + i * zero_b + n * zero_n, mask=there, other=0.0)
        curvature = tl.load(hessian + i * hessian_r + i * hessian_c)
        slope_N = tl.sum(tl.where((b == i)[:, None], slope_BN, 0.0), axis=0)
        wanted = x + tl.div_rn(slope_N, curvature)
        code = tl.minimum(tl.maximum(tl.div_rn(wanted, s), -FAR), FAR)
        code = (code + ROUND) - ROUND
        code = tl.minimum(tl.maximum(code + z, 0.0), LAST * 1.0)
        change = (code - z) * s - x
        tl.store(codes + i * outputs + n, code, mask=there)
        tl.store(moved + i * outputs + n, change, mask=there)
        row = tl.load(hessian + i * hessian_r + b * hessian_c, mask=b < columns, other=0.0)
        slope_BN -= row[:, None] * change[None, :]
