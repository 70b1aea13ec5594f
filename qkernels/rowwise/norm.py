"""Norms in Triton. The input may be a sum (residual, split-K); the output may have any form.

There are two kernels. One has one program per row and stores a tensor or 8-bit codes. The other has
several programs per row: each one reduces the whole row and makes limbs of its own K steps. Values
are rounded at the same points as in reference.py. Legend: M rows, C channels.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.codes_triton import empty_codes, rounding_constants
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.limbs import K_STEP, LimbForm, Limbs, empty_limbs
from qkernels.operands.limbs_triton import (
    load_reduced_steps,
    load_steps,
    store_limbs,
    store_steps,
)
from qkernels.operands.split_k import LinearOutput, reduced
from qkernels.operands.split_k_triton import contiguous, load_reduced, partials_source, reduce_warps
from qkernels.rowwise.arithmetic_triton import (
    changed_branch,
    normalized,
    row_statistics,
    store_row,
)
from qkernels.rowwise.limbs import to_limbs
from qkernels.rowwise.quantize import dependent_launch, row_warps
from qkernels.rowwise.spec import PLAIN, Branch, NormSpec, norm_constants, norm_tensors

# K steps per block. Several blocks share a row because the instructions of one block for 32 steps
# take 1 us.
NORM_STEPS = 8
MAX_CHANNELS = 2**14  # most channels of a row that a block can hold in registers


def norm(
    x: LinearOutput,
    residual: torch.Tensor | None,
    spec: NormSpec | None,
    out: InputForm = None,
    branch: Branch = PLAIN,
    addend: torch.Tensor | None = None,
) -> tuple[LinearInput, torch.Tensor]:
    """Implement ops.norm in Triton."""
    if residual is not None:
        residual = residual.contiguous()
    if addend is not None:
        addend = addend.contiguous()
    if isinstance(out, LimbForm):
        if addend is not None:
            x = reduced(x) + addend
        return _norm_to_limbs(x, residual, spec, out, branch)
    C = x.shape[-1]
    source, stride_part, format = partials_source(contiguous(x))
    shape, device = x.shape, source.device
    total = None if residual is None else torch.empty(shape, dtype=x.dtype, device=device)
    rows, block = shape.numel() // C if C else 0, power_of_two(C)
    if out is None:
        y = None if spec is None else torch.empty(shape, dtype=x.dtype, device=device)
        scale = scales_M1 = None
        warps, pdl = _warps(block), {"LAUNCH_FIRST": True, **pdl_options(source, rows)}
    else:
        y, scales_M1 = empty_codes(rows, C, out.activation, device)
        scale = None if out.activation.dynamic else out.scale
        warps, pdl = row_warps(block), dependent_launch(rows, C, device)
    if rows:
        with on_device(source):
            launch(
                _norm_rows,
                (rows,),
                source,
                stride_part,
                addend,
                residual,
                *norm_tensors(spec),
                *norm_tensors(branch.norm),
                total,
                y,
                scale,
                scales_M1,
                C,
                0.0 if spec is None else spec.eps,
                **norm_constants(spec, branch),
                BLOCK=block,
                num_warps=reduce_warps(block) if format.parts else warps,
                SUM=format,
                **rounding_constants(out),
                **pdl,
            )
    total = x if total is None else total
    if isinstance(out, InputRounding):
        return Codes(y, scales_M1), total
    return total if y is None else y, total


def _warps(block: int) -> int:
    """Return the number of warps: one for 256 channels, at most 8."""
    return min(8, max(1, block // 256))


@triton.jit
def _norm_rows(
    x_ptr,  # [M, C], or split-K partial sums of it
    stride_part,
    addend_ptr,  # [M, C] or None
    residual_ptr,  # [M, C] or None
    weight_ptr,  # [C] or None: only the sum is computed
    bias_ptr,  # [C] or None
    branch_ptr,  # [C] or None
    branch_bias_ptr,  # [C] or None
    total_ptr,  # [M, C] or None
    out_ptr,  # [M, C] of a float type or codes; None: only the sum is stored
    scale_ptr,  # [] or None: dynamic
    scales_ptr,  # [M], or None: no codes
    C,
    eps,
    KIND: tl.constexpr,
    BRANCH_KIND: tl.constexpr,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_FIRST: tl.constexpr,
):
    """Normalize one row."""
    DTYPE: tl.constexpr = SUM.dtype
    m = tl.program_id(0).to(tl.int64)
    row = m * C
    c = tl.arange(0, BLOCK)
    mask = c < C
    bias = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=mask, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + c, mask=mask, other=0.0)
    branch, branch_bias = None, None
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + c, mask=mask, other=0.0)
        if branch_bias_ptr is not None:
            branch_bias = tl.load(branch_bias_ptr + c, mask=mask, other=0.0)
    if PDL:
        # the weight is loaded before the wait; the previous kernel may still write x
        pdl_launch_and_wait(LAUNCH_FIRST)
    x = load_reduced(x_ptr + row + c, mask, stride_part, SUM).to(tl.float32)
    if addend_ptr is not None:
        x += tl.load(addend_ptr + row + c, mask=mask, other=0.0).to(tl.float32)
        x = x.to(DTYPE).to(tl.float32)
    if residual_ptr is not None:
        x = changed_branch(
            x, branch, branch_bias, mask, C, BRANCH_KIND, BRANCH_EPS, BRANCH_FACTOR, DTYPE
        )
        x += tl.load(residual_ptr + row + c, mask=mask, other=0.0).to(tl.float32)
        # the residual stream has DTYPE, so the norm reads the rounded sum
        rounded = x.to(DTYPE)
        tl.store(total_ptr + row + c, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if out_ptr is not None:
        if weight_ptr is None:
            y = x.to(DTYPE)
        else:
            mean, inverse = row_statistics(x, mask, C, eps, KIND)
            y = normalized(x, mean, inverse, weight, bias, KIND, DTYPE)
        store_row(
            *(y, out_ptr, row + c, mask, scale_ptr, scales_ptr, m),
            *(SMALLEST, LARGEST, MIN_SCALE, INTERPRETED),
        )


def _norm_to_limbs(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor | None,
    spec: NormSpec | None,
    form: LimbForm,
    branch: Branch,
) -> tuple[Limbs, torch.Tensor]:
    M, C = x_MC.shape
    if C > MAX_CHANNELS:
        normed_MC, total_MC = norm(x_MC, residual_MC, spec, None, branch)
        return to_limbs(normed_MC, form), total_MC
    source, stride_part, format = partials_source(contiguous(x_MC))
    limbs = empty_limbs(form, M, C, source.device, x_MC.dtype)
    total_MC = None
    if residual_MC is not None:
        total_MC = torch.empty((M, C), dtype=x_MC.dtype, device=source.device)
    steps = C // K_STEP
    whole = power_of_two(C)
    with on_device(source):
        launch(
            _norm_steps,
            (M, ceil_div(steps, NORM_STEPS)),
            source,
            stride_part,
            residual_MC,
            *norm_tensors(spec),
            *norm_tensors(branch.norm),
            total_MC,
            limbs.words,
            limbs.scales,
            limbs.sums,
            limbs.tensor,
            M,
            steps,
            0.0 if spec is None else spec.eps,
            **norm_constants(spec, branch),
            FORM=form,
            WHOLE=whole,
            BLOCK=NORM_STEPS,
            SUM=format,
            num_warps=max(8, reduce_warps(whole)) if format.parts else 8,
            **pdl_options(source, M),
        )
    return limbs, x_MC if total_MC is None else total_MC


@triton.jit(do_not_specialize=["M"])
def _norm_steps(
    x_ptr,  # [M, C], or split-K partial sums of it
    stride_part,
    residual_ptr,  # [M, C] or None
    weight_ptr,  # [C] or None: only the sum is computed
    bias_ptr,  # [C] or None
    branch_ptr,  # [C] or None
    branch_bias_ptr,  # [C] or None
    total_ptr,  # [M, C] or None
    words_ptr,
    scales_ptr,
    sums_ptr,
    y_ptr,  # [M, C] or None
    M,
    steps,
    eps,
    KIND: tl.constexpr,
    BRANCH_KIND: tl.constexpr,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the statistics of one row (x) and make limbs of BLOCK of its steps (own)."""
    DTYPE: tl.constexpr = SUM.dtype
    m, first = tl.program_id(0), tl.program_id(1) * BLOCK
    row = m.to(tl.int64) * steps * 128
    c = tl.arange(0, WHOLE)
    inside = c < steps * 128
    bias = None
    if weight_ptr is not None:
        weight = load_steps(weight_ptr, first, steps, BLOCK, FORM)
        if bias_ptr is not None:
            bias = load_steps(bias_ptr, first, steps, BLOCK, FORM)
    branch_bias, own_branch_bias = None, None
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + c, mask=inside, other=0.0)
        own_branch = load_steps(branch_ptr, first, steps, BLOCK, FORM)
        if branch_bias_ptr is not None:
            branch_bias = tl.load(branch_bias_ptr + c, mask=inside, other=0.0)
            own_branch_bias = load_steps(branch_bias_ptr, first, steps, BLOCK, FORM)
    if PDL:
        # the weight is loaded before the wait; the previous kernel may still write x
        pdl_launch_and_wait()
    x = load_reduced(x_ptr + row + c, inside, stride_part, SUM).to(tl.float32)
    own = load_reduced_steps(x_ptr + row, stride_part, first, steps, BLOCK, FORM, SUM)
    own = own.to(tl.float32)
    if residual_ptr is not None:
        if branch_ptr is not None:
            mean, inverse = row_statistics(x, inside, steps * 128, BRANCH_EPS, BRANCH_KIND)
            x = normalized(x, mean, inverse, branch, branch_bias, BRANCH_KIND, DTYPE)
            x = x.to(tl.float32)
            own = normalized(own, mean, inverse, own_branch, own_branch_bias, BRANCH_KIND, DTYPE)
            own = own.to(tl.float32)
        if BRANCH_FACTOR != 1.0:
            x = (x * BRANCH_FACTOR).to(DTYPE).to(tl.float32)
            own = (own * BRANCH_FACTOR).to(DTYPE).to(tl.float32)
        x += tl.load(residual_ptr + row + c, mask=inside, other=0.0).to(tl.float32)
        own += load_steps(residual_ptr + row, first, steps, BLOCK, FORM).to(tl.float32)
        # the residual stream has DTYPE, so the norm reads the rounded sum
        x = x.to(DTYPE).to(tl.float32)
        rounded = own.to(DTYPE)
        store_steps(total_ptr + row, rounded, first, steps, FORM)
        own = rounded.to(tl.float32)
    if weight_ptr is None:
        y = own.to(DTYPE)
    else:
        mean, inverse = row_statistics(x, inside, steps * 128, eps, KIND)
        y = normalized(own, mean, inverse, weight, bias, KIND, DTYPE)
    if y_ptr is not None:
        store_steps(y_ptr + row, y, first, steps, FORM)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
