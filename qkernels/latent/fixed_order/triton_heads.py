"""Batch-invariant products by head in Triton: one chain of sums over K for every tile size.

Legend: T rows, H heads, K inputs, N outputs of a head; BT, BN, BK the tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.latent.fixed_order.config import rows_of_tile

BLOCK_K = 64


def multiply(
    x_THK: torch.Tensor,
    weight_HKN: torch.Tensor,
    out_THN: torch.Tensor,
    block_t: int | None = None,
) -> None:
    """Write the products to `out_THN`.

    `block_t` sets the tile's rows; it does not change any bit.
    """
    T, H, K = x_THK.shape
    N = weight_HKN.shape[2]
    if T == 0:
        return
    if x_THK.stride(2) != 1:
        x_THK = x_THK.contiguous()
    assert out_THN.stride(2) == 1, "a head's outputs are adjacent"
    block_t = block_t or rows_of_tile(T)
    block_n = min(128, max(16, power_of_two(N)))
    with on_device(x_THK):
        launch(
            _multiply_heads,
            (ceil_div(T, block_t), ceil_div(N, block_n), H),
            x_THK,
            weight_HKN.contiguous(),
            out_THN,
            T,
            *x_THK.stride()[:2],
            *out_THN.stride()[:2],
            K=K,
            N=N,
            BT=block_t,
            BN=block_n,
            BK=BLOCK_K,
            num_warps=4 if block_t < 128 else 8,
        )


@triton.jit(do_not_specialize=["T"])
def _multiply_heads(
    x_ptr,  # [T, H, K]
    weight_ptr,  # [H, K, N]
    out_ptr,  # [T, H, N]
    T,
    stride_xt,
    stride_xh,
    stride_ot,
    stride_oh,
    K: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    h = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_t, in_n = (t < T)[:, None], (n < N)[None, :]
    x_ptrs = x_ptr + h * stride_xh + t.to(tl.int64)[:, None] * stride_xt + k[None, :]
    weight_ptrs = weight_ptr + h * K * N + k[:, None] * N + n[None, :]
    total = tl.zeros((BT, BN), tl.float32)
    for first in tl.range(0, K, BK, num_stages=2):
        in_k = k < K - first
        x = tl.load(x_ptrs + first, mask=in_t & in_k[None, :], other=0.0)
        weight = tl.load(weight_ptrs + first * N, mask=in_k[:, None] & in_n, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    out_ptrs = out_ptr + h * stride_oh + t.to(tl.int64)[:, None] * stride_ot + n[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_t & in_n)
