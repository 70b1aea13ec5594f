"""Norms, activation and rotary embedding, one Triton kernel each. Knows no model.

Each rounds where its twin in reference.py rounds. Legend: C channels, I intermediate size, T
tokens, H query heads, J KV heads, D head dim.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.operands.split_k import LinearOutput
from qkernels.operands.split_k_triton import contiguous, load_reduced, partials_source, reduce_warps
from qkernels.rowwise.branch import PLAIN, Branch
from qkernels.rowwise.branch_triton import changed_branch, gelu_argument, weighted


def _warps(block: int) -> int:
    """Four channels at a time for each thread, 8 warps at most."""
    return min(8, max(1, block // 256))


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """As ops.rms_norm."""
    out, _ = _norm(x, None, weight_C, eps)
    return out


def add_rms_norm(
    x: LinearOutput,
    residual: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ops.add_rms_norm."""
    return _norm(x, residual.contiguous(), weight_C, eps, branch)


def _norm(
    x: LinearOutput,
    residual: torch.Tensor | None,
    weight_C: torch.Tensor | None,
    eps: float,
    branch: Branch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    C = x.shape[-1]
    source, stride_part, format = partials_source(contiguous(x))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    block = power_of_two(C)
    if out.numel():
        with on_device(out):
            rows = out.numel() // C
            launch(
                _rms_norm,
                (rows,),
                source,
                stride_part,
                residual,
                weight_C,
                branch.norm_C,
                None if weight_C is None else out,
                total,
                C,
                eps,
                **branch.launch_constants(),
                BLOCK=block,
                num_warps=reduce_warps(block) if format.parts else _warps(block),
                SUM=format,
                **pdl_options(out, rows),
            )
    return total if weight_C is None else out, total


@triton.jit
def _rms_norm(
    x_ptr,  # [M, C], or parts of it (split_k_triton.py)
    stride_part,
    residual_ptr,  # [M, C] or None
    weight_ptr,  # [C] or None: the sum alone
    branch_ptr,  # [C] or None
    out_ptr,  # [M, C], or None without a weight
    total_ptr,  # [M, C] or None
    C,
    eps,
    BRANCH_EPS: tl.constexpr,
    BRANCH_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = SUM.dtype
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, BLOCK)
    mask = c < C
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=mask, other=0.0)
    branch = None
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + c, mask=mask, other=0.0)
    if PDL:
        # after the weight, which never changes; x is the previous kernel's until it ends
        pdl_launch_and_wait()
    x = load_reduced(x_ptr + row + c, mask, stride_part, SUM).to(tl.float32)
    if residual_ptr is not None:
        x = changed_branch(x, branch, C, BRANCH_EPS, BRANCH_FACTOR, DTYPE)
        x += tl.load(residual_ptr + row + c, mask=mask, other=0.0).to(tl.float32)
        # the model's residual stream is in DTYPE, and the norm sees it rounded
        rounded = x.to(DTYPE)
        tl.store(total_ptr + row + c, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if weight_ptr is not None:
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
        tl.store(out_ptr + row + c, weighted(normed, weight, DTYPE), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As ops.silu_and_mul."""
    return _act_and_mul(x, gelu=False)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As ops.gelu_and_mul."""
    return _act_and_mul(x, gelu=True)


def _act_and_mul(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    block = min(1024, power_of_two(width))
    if out.numel():
        with on_device(x):
            rows = out.numel() // width
            launch(
                _silu_and_mul,
                (rows, ceil_div(width, block)),
                x,
                out,
                width,
                GELU=gelu,
                BLOCK=block,
                num_warps=4,
                **pdl_options(x, rows),
            )
    return out


@triton.jit
def _silu_and_mul(
    x_ptr,
    out_ptr,
    I,  # noqa: E741  the legend's name
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        pdl_launch_and_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * I + c, mask=c < I, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * I + I + c, mask=c < I, other=0.0).to(tl.float32)
    argument = gelu_argument(gate) if GELU else gate
    activated = (gate / (1 + tl.exp(-argument))).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + row * I + c, (activated * up).to(DTYPE), mask=c < I)
