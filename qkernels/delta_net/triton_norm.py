"""The norm after a gated delta net in Triton: a program normalizes some heads of a token.

Values are rounded at the same points as in reference.py. Legend: see ops.py.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device

TILE = 4096  # elements per program


def gated_rms_norm(
    x_THV: torch.Tensor,
    z_THV: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Implement ops.gated_rms_norm."""
    x_THV = x_THV.contiguous()
    T, H, V = x_THV.shape
    if z_THV.stride()[1:] != (V, 1):
        z_THV = z_THV.contiguous()
    y_THV = torch.empty_like(x_THV)
    width = power_of_two(V)
    heads = min(power_of_two(H), max(1, TILE // width))
    if y_THV.numel():
        with on_device(x_THV):
            launch(
                _gated_rms_norm,
                (T, ceil_div(H, heads)),
                x_THV,
                z_THV,
                weight_V,
                y_THV,
                z_THV.stride(0),
                eps,
                H=H,
                V=V,
                BH=heads,
                BV=width,
                SIGMOID=sigmoid,
                num_warps=4,
            )
    return y_THV


@triton.jit
def _gated_rms_norm(
    x_ptr,
    z_ptr,
    weight_ptr,
    y_ptr,
    stride_z,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    v = tl.arange(0, BV)
    mask = (h < H)[:, None] & (v < V)[None, :]
    of_heads = h[:, None] * V + v[None, :]
    weight = tl.load(weight_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + t * H * V + of_heads, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t * stride_z + of_heads, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    if SIGMOID:
        y = weight[None, :] * normed / (1.0 + tl.exp(-z))
    else:
        normed = (weight[None, :] * normed.to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
        y = normed * (z / (1.0 + tl.exp(-z)))
    tl.store(y_ptr + t * H * V + of_heads, y.to(DTYPE), mask=mask)
