"""The gated norm of Mamba-2 in Triton: a program normalizes one group of a token's channels.

Legend: see ops.py; BC channels of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import power_of_two
from qkernels.gpu.launch import launch, on_device


def gated_group_norm(
    x_TC: torch.Tensor,
    z_TC: torch.Tensor,
    weight_C: torch.Tensor | None,
    groups: int,
    eps: float,
    norm_first: bool,
) -> torch.Tensor:
    """Implement ops.gated_group_norm."""
    x_TC, z_TC = (x if x.stride(1) == 1 else x.contiguous() for x in (x_TC, z_TC))
    T, C = x_TC.shape
    y_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    width = power_of_two(C // groups)
    if y_TC.numel():
        with on_device(x_TC):
            launch(
                _gated_group_norm,
                (T, groups),
                x_TC,
                z_TC,
                x_TC if weight_C is None else weight_C,
                y_TC,
                x_TC.stride(0),
                z_TC.stride(0),
                eps,
                C=C,
                WIDTH=C // groups,
                NORMS=weight_C is not None,
                NORM_FIRST=norm_first,
                BC=width,
                num_warps=min(8, max(1, width // 256)),
            )
    return y_TC


@triton.jit
def _gated_group_norm(
    x_ptr,
    z_ptr,
    weight_ptr,
    y_ptr,
    stride_x,
    stride_z,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMS: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BC: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BC)
    c, mask = tl.program_id(1) * WIDTH + i, i < WIDTH
    x = tl.load(x_ptr + t * stride_x + c, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t * stride_z + c, mask=mask, other=0.0).to(tl.float32)
    gate = z / (1.0 + tl.exp(-z))
    if NORMS:
        weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
        if not NORM_FIRST:
            x *= gate
        x = weight * (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps))
        if NORM_FIRST:
            x *= gate
    else:
        x *= gate
    tl.store(y_ptr + t * C + c, x.to(y_ptr.dtype.element_ty), mask=mask)
