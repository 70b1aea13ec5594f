"""Activation functions in Triton, gated or not, with a tensor, 8-bit codes or limbs as the result.

Each output form has its own kernel, because the kernels spread rows over programs differently.
Values are rounded at the same points as in reference.py. Legend: M rows, I features of the result.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.codes_triton import (
    empty_codes,
    encode,
    rounding_constants,
    scale_of_chunks,
)
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.limbs import LimbForm, Limbs, empty_limbs
from qkernels.operands.limbs_triton import load_steps, store_limbs, store_steps
from qkernels.rowwise.arithmetic_triton import activated
from qkernels.rowwise.limbs import limbs_by_steps
from qkernels.rowwise.quantize import (
    NO_PDL,
    dependent_launch,
    row_chunks,
)
from qkernels.rowwise.spec import ActSpec


def activate(x: torch.Tensor, spec: ActSpec, out: InputForm = None) -> LinearInput:
    """Implement ops.activate in Triton."""
    width = x.shape[-1] // 2 if spec.gated else x.shape[-1]
    constants = {"KIND": spec.kind, "GATED": spec.gated, "LIMIT": spec.limit or 0.0}
    constants["ALPHA"] = spec.alpha
    x = x.contiguous()
    if isinstance(out, LimbForm):
        return _to_limbs(x, width, out, constants)
    if isinstance(out, InputRounding):
        return _to_codes(x, width, out, constants)
    y = x.new_empty(*x.shape[:-1], width)
    block = min(1024, power_of_two(width))
    if y.numel():
        with on_device(x):
            rows = y.numel() // width
            launch(
                _activate_blocks,
                (rows, ceil_div(width, block)),
                x,
                y,
                width,
                **constants,
                BLOCK=block,
                num_warps=4,
                **pdl_options(x, rows),
            )
    return y


@triton.jit
def _activate_blocks(
    x_ptr,  # [M, 2 I], or [M, I] if not gated
    out_ptr,  # [M, I]
    I,  # noqa: E741  the legend's name
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Activate BLOCK features of one row."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        pdl_launch_and_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    up = None
    if GATED:
        gate = tl.load(x_ptr + row * 2 * I + c, mask=c < I, other=0.0)
        up = tl.load(x_ptr + row * 2 * I + I + c, mask=c < I, other=0.0)
    else:
        gate = tl.load(x_ptr + row * I + c, mask=c < I, other=0.0)
    y = activated(gate, up, KIND, DTYPE, False, LIMIT, ALPHA)
    tl.store(out_ptr + row * I + c, y, mask=c < I)


def _to_codes(
    x: torch.Tensor, width: int, rounding: InputRounding, constants: dict[str, object]
) -> Codes:
    M, activation = x.shape[0], rounding.activation
    codes_MI, scales_M1 = empty_codes(M, width, activation, x.device)
    if M:
        chunk, chunks, warps = row_chunks(width, x.element_size())
        bounded = x.element_size() == 2 and chunks < 8 and width % 16 == 0
        # 4096 rows of 14336 take 70.7 us with three blocks per SM, 77 with two, and 72.1 with
        # PDL. 256 rows take 6.2 us with two blocks per SM and 7.5 with three.
        many = 2 * sm_count(x.device) < M
        pdl = NO_PDL if many else dependent_launch(M, width, x.device)
        with on_device(x):
            launch(
                _activate_rows,
                (M,),
                x,
                None if activation.dynamic else rounding.scale,
                codes_MI,
                scales_M1,
                width,
                **constants,
                CHUNK=chunk,
                CHUNKS=chunks,
                num_warps=warps,
                maxnreg=(80 if many else 96) if bounded else None,
                **rounding_constants(rounding),
                **pdl,
            )
    return Codes(codes_MI, scales_M1)


@triton.jit
def _activate_rows(
    x_ptr,  # [M, 2 I], or [M, I] if not gated
    scale_ptr,  # [] or None: dynamic
    codes_ptr,  # [M, I]
    scales_ptr,  # [M]
    I,  # noqa: E741  the legend's name
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_FIRST: tl.constexpr,
):
    """Activate one row in chunks and quantize it."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    DYNAMIC: tl.constexpr = scale_ptr is None
    HALVES: tl.constexpr = 2 if GATED else 1
    m = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNK)
    if PDL:
        pdl_launch_and_wait(LAUNCH_FIRST)
    # the loads of all chunks are in flight before the first is used
    gates = ()
    ups = ()
    for i in tl.static_range(CHUNKS):
        ptrs = x_ptr + m * HALVES * I + i * CHUNK + c
        mask = i * CHUNK + c < I
        gates = gates + (tl.load(ptrs, mask=mask, other=0.0),)
        if GATED:
            ups = ups + (tl.load(ptrs + I, mask=mask, other=0.0),)
    ys = ()
    for i in tl.static_range(CHUNKS):
        up = ups[i] if GATED else None
        ys = ys + (activated(gates[i], up, KIND, DTYPE, not INTERPRETED, LIMIT, ALPHA),)
    scale = scale_of_chunks(ys, LARGEST, MIN_SCALE) if DYNAMIC else tl.load(scale_ptr)
    CODE: tl.constexpr = codes_ptr.dtype.element_ty
    for i in tl.static_range(CHUNKS):
        codes = encode(ys[i], scale, SMALLEST, LARGEST, CODE, DYNAMIC, INTERPRETED)
        tl.store(codes_ptr + m * I + i * CHUNK + c, codes, mask=i * CHUNK + c < I)
    tl.store(scales_ptr + m, scale)


def _to_limbs(x: torch.Tensor, width: int, form: LimbForm, constants: dict[str, object]) -> Limbs:
    limbs = empty_limbs(form, x.shape[0], width, x.device, x.dtype)
    limbs_by_steps(_activate_steps, x, limbs, limbs.tensor, **constants)
    return limbs


@triton.jit(do_not_specialize=["M"])
def _activate_steps(
    x_ptr,  # [M, 2 I], or [M, I] if not gated
    words_ptr,
    scales_ptr,
    sums_ptr,
    y_ptr,  # [M, I] or None
    M,
    steps,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Activate BLOCK steps of one row and make limbs of them."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    HALVES: tl.constexpr = 2 if GATED else 1
    m, first = tl.program_id(1), tl.program_id(0) * BLOCK
    row_ptr = x_ptr + m.to(tl.int64) * steps * (128 * HALVES)
    if PDL:
        pdl_launch_and_wait()
    gate = load_steps(row_ptr, first, steps, BLOCK, FORM)
    up = None
    if GATED:
        up = load_steps(row_ptr + steps * 128, first, steps, BLOCK, FORM)
    y = activated(gate, up, KIND, DTYPE, False, LIMIT, ALPHA)
    if y_ptr is not None:
        store_steps(y_ptr + m.to(tl.int64) * steps * 128, y, first, steps, FORM)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
