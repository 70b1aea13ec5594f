"""Norm or activation, and its result as limbs for the next linear, in one Triton kernel.

What the two operations in turn compute (norm_act.py, to_limbs.py), without a kernel between
them. Legend: M rows, C channels, I intermediate size.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.limbs import K_STEP, LimbForm, Limbs, empty_limbs
from qkernels.operands.limbs_triton import (
    load_reduced_steps,
    load_steps,
    store_limbs,
    store_steps,
)
from qkernels.operands.split_k import LinearOutput
from qkernels.operands.split_k_triton import contiguous, load_reduced, partials_source, reduce_warps
from qkernels.rowwise.branch import PLAIN, Branch
from qkernels.rowwise.branch_triton import gelu_argument, weighted
from qkernels.rowwise.limbs import limbs_by_steps, to_limbs
from qkernels.rowwise.norm_act import add_rms_norm, rms_norm

# Steps of a block, so that a row has several: each sums up the whole row, and makes limbs of its
# part. One block for 32 steps is busy for 1 us with instructions alone.
NORM_STEPS = 8
MOST_CHANNELS = 2**14  # of a row that a block's registers hold


def rms_norm_limbs(x_MC: torch.Tensor, weight_C: torch.Tensor, eps: float, form: LimbForm) -> Limbs:
    """As ops.rms_norm_limbs."""
    limbs, _ = _norm(x_MC, None, weight_C, eps, form)
    return limbs


def add_rms_norm_limbs(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    form: LimbForm,
    branch: Branch = PLAIN,
) -> tuple[Limbs, torch.Tensor]:
    """As ops.add_rms_norm_limbs."""
    return _norm(x_MC, residual_MC.contiguous(), weight_C, eps, form, branch)


def _norm(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    eps: float,
    form: LimbForm,
    branch: Branch = PLAIN,
) -> tuple[Limbs, torch.Tensor | None]:
    M, C = x_MC.shape
    if C > MOST_CHANNELS:
        if residual_MC is None:
            normed_MC, total_MC = rms_norm(x_MC, weight_C, eps), None
        else:
            normed_MC, total_MC = add_rms_norm(x_MC, residual_MC, weight_C, eps, branch)
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
            _rms_norm_limbs,
            (M, ceil_div(steps, NORM_STEPS)),
            source,
            stride_part,
            residual_MC,
            weight_C,
            branch.norm_C,
            total_MC,
            limbs.words,
            limbs.scales,
            limbs.sums,
            limbs.tensor,
            M,
            steps,
            eps,
            **branch.launch_constants(),
            FORM=form,
            WHOLE=whole,
            BLOCK=NORM_STEPS,
            SUM=format,
            num_warps=max(8, reduce_warps(whole)) if format.parts else 8,
            **pdl_options(source, M),
        )
    return limbs, total_MC


@triton.jit(do_not_specialize=["M"])
def _rms_norm_limbs(
    x_ptr,  # [M, C], or parts of it (split_k_triton.py)
    stride_part,
    residual_ptr,  # [M, C] or None
    weight_ptr,  # [C] or None: the sum alone
    branch_ptr,  # [C] or None
    total_ptr,  # [M, C] or None
    words_ptr,
    scales_ptr,
    sums_ptr,
    y_ptr,  # [M, C] or None
    M,
    steps,
    eps,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of one row, and limbs of BLOCK steps of it."""
    DTYPE: tl.constexpr = SUM.dtype
    m, first = tl.program_id(0), tl.program_id(1) * BLOCK
    row = m.to(tl.int64) * steps * 128
    c = tl.arange(0, WHOLE)
    inside = c < steps * 128
    if weight_ptr is not None:
        weight = load_steps(weight_ptr, first, steps, BLOCK, FORM).to(tl.float32)
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + c, mask=inside, other=0.0)
        own_branch = load_steps(branch_ptr, first, steps, BLOCK, FORM)
    if PDL:
        # after the weight, which never changes; x is the previous kernel's until it ends
        pdl_launch_and_wait()
    x = load_reduced(x_ptr + row + c, inside, stride_part, SUM).to(tl.float32)
    own = load_reduced_steps(x_ptr + row, stride_part, first, steps, BLOCK, FORM, SUM)
    own = own.to(tl.float32)
    if residual_ptr is not None:
        if branch_ptr is not None:
            shrink = tl.rsqrt(tl.sum(x * x, 0) / (steps * 128) + BRANCH_EPS)
            x = weighted(x * shrink, branch, DTYPE).to(tl.float32)
            own = weighted(own * shrink, own_branch, DTYPE).to(tl.float32)
        if BRANCH_FACTOR != 1.0:
            x = (x * BRANCH_FACTOR).to(DTYPE).to(tl.float32)
            own = (own * BRANCH_FACTOR).to(DTYPE).to(tl.float32)
        x += tl.load(residual_ptr + row + c, mask=inside, other=0.0).to(tl.float32)
        own += load_steps(residual_ptr + row, first, steps, BLOCK, FORM).to(tl.float32)
        # the model's residual stream is in DTYPE, and the norm sees it rounded
        x = x.to(DTYPE).to(tl.float32)
        rounded = own.to(DTYPE)
        store_steps(total_ptr + row, rounded, first, steps, FORM)
        own = rounded.to(tl.float32)
    if weight_ptr is None:
        y = own.to(DTYPE)
    else:
        factor = tl.rsqrt(tl.sum(x * x, 0) / (steps * 128) + eps)
        normed = own * factor
        if weight_ptr.dtype.element_ty != tl.float32:  # else the product alone is rounded
            normed = normed.to(DTYPE).to(tl.float32)
        y = (weight * normed).to(DTYPE)
    if y_ptr is not None:
        store_steps(y_ptr + row, y, first, steps, FORM)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)


def silu_and_mul_limbs(x_M2I: torch.Tensor, form: LimbForm) -> Limbs:
    """As ops.silu_and_mul_limbs."""
    return _activate_and_mul(x_M2I, form, GELU=False)


def gelu_and_mul_limbs(x_M2I: torch.Tensor, form: LimbForm) -> Limbs:
    """As ops.gelu_and_mul_limbs."""
    return _activate_and_mul(x_M2I, form, GELU=True)


def _activate_and_mul(x_M2I: torch.Tensor, form: LimbForm, *, GELU: bool) -> Limbs:
    M, width = x_M2I.shape
    limbs = empty_limbs(form, M, width // 2, x_M2I.device, x_M2I.dtype)
    limbs_by_steps(_silu_and_mul_limbs, x_M2I.contiguous(), limbs, limbs.tensor, GELU=GELU)
    return limbs


@triton.jit(do_not_specialize=["M"])
def _silu_and_mul_limbs(
    x_ptr,  # [M, 2 I]
    words_ptr,
    scales_ptr,
    sums_ptr,
    y_ptr,  # [M, I] or None
    M,
    steps,
    GELU: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK steps of one row."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    m, first = tl.program_id(1), tl.program_id(0) * BLOCK
    row_ptr = x_ptr + m.to(tl.int64) * steps * 256
    if PDL:
        pdl_launch_and_wait()
    gate = load_steps(row_ptr, first, steps, BLOCK, FORM).to(tl.float32)
    up = load_steps(row_ptr + steps * 128, first, steps, BLOCK, FORM).to(tl.float32)
    argument = gelu_argument(gate) if GELU else gate
    activated = (gate / (1 + tl.exp(-argument))).to(DTYPE).to(tl.float32)
    y = (activated * up).to(DTYPE)
    if y_ptr is not None:
        store_steps(y_ptr + m.to(tl.int64) * steps * 128, y, first, steps, FORM)
    store_limbs(y, words_ptr, scales_ptr, sums_ptr, m, first, M, steps, FORM)
