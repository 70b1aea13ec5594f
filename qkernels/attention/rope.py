"""Rotary embedding of queries and keys, in Triton."""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import power_of_two
from qkernels.gpu.launch import launch, on_device


def apply_rope(
    q_THD: torch.Tensor,
    k_TJD: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ops.apply_rope."""
    T, H, D = q_THD.shape
    J = k_TJD.shape[1]
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    k_TJD = k_TJD if k_TJD.stride(2) == 1 else k_TJD.contiguous()
    q_out = q_THD.new_empty((T, H, D))
    k_out = k_TJD.new_empty((T, J, D))
    if T:
        with on_device(q_THD):
            launch(
                _apply_rope,
                (T, H + J),
                q_THD,
                k_TJD,
                cos_sin.contiguous(),
                positions_T.contiguous(),
                q_out,
                k_out,
                *q_THD.stride()[:2],
                *k_TJD.stride()[:2],
                H=H,
                J=J,
                D=D,
                PADDED_D=power_of_two(D),
                WIDTH=cos_sin.shape[1],
                INTERLEAVED=interleaved,
                num_warps=1,
            )
    return q_out, k_out


@triton.jit
def _apply_rope(
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kj,
    H: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    HALF: tl.constexpr = WIDTH // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED_D)
    turns = d < WIDTH
    if INTERLEAVED:
        first = d % 2 == 0
        partner = tl.where(turns, d ^ 1, d)
        frequency = d // 2
    else:
        first = d < HALF
        partner = tl.where(first, d + HALF, tl.where(turns, d - HALF, d))
        frequency = tl.where(first, d, d - HALF)
    angle = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * WIDTH + frequency
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + HALF, mask=turns, other=0.0)
    sin = tl.where(first, -sin, sin)
    if head < H:
        x_ptr = q_ptr + token * stride_qt + head * stride_qh
        out_ptr = q_out_ptr + (token * H + head) * D
    else:
        x_ptr = k_ptr + token * stride_kt + (head - H) * stride_kj
        out_ptr = k_out_ptr + (token * J + head - H) * D
    x = tl.load(x_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
    rotated = x * cos + other * sin
    tl.store(out_ptr + d, rotated.to(q_ptr.dtype.element_ty), mask=d < D)
