"""y = x W^T with a 16-bit float weight, in Triton, batch-invariant: one chain of sums over K.

The order of the sums is the same for every tile size. Legend: M rows of x, K inputs, N outputs; BM,
BN, BK the tile.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import has_tma, sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_options
from qkernels.gpu.tma import TMA_ALIGNMENT, describe
from qkernels.linear.float_config import FloatConfig, float_config

GROUP_M = 8  # row tiles that run at the same time, to share weight rows in the L2


def multiply(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    config: FloatConfig | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, [M, N]. `config` replaces the default; it does not change any bit."""
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    y_MN = x_MK.new_empty(M, N)
    if M == 0:
        return y_MN
    config = config or float_config(M, N, sm_count(x_MK.device))
    weight_NK = weight_NK.contiguous()
    use_tma = has_tma(x_MK.device) and not any(
        each.data_ptr() % TMA_ALIGNMENT or K * each.element_size() % TMA_ALIGNMENT
        for each in (x_MK, weight_NK)
    )
    x, weight = x_MK, weight_NK
    if use_tma:
        x = describe(TensorDescriptor, x_MK, (config.block_m, config.block_k))
        weight = describe(TensorDescriptor, weight_NK, (config.block_n, config.block_k))
    with on_device(x_MK):
        launch(
            _float_linear,
            (ceil_div(M, config.block_m) * ceil_div(N, config.block_n),),
            x,
            weight,
            bias_N,
            y_MN,
            M,
            N,
            K,
            BM=config.block_m,
            BN=config.block_n,
            BK=config.block_k,
            STAGES=config.stages,
            GROUP_M=GROUP_M,
            WEIGHT_IS_A=config.weight_is_a,
            USE_TMA=use_tma,
            num_warps=config.warps,
            **pdl_options(x_MK, M),
        )
    return y_MN


@triton.jit
def _load(source, first, rows, step, K, BR: tl.constexpr, BK: tl.constexpr, USE_TMA: tl.constexpr):
    """Load a tile [BR, BK] at row `first`, with zeros beyond the last row and the last input."""
    if USE_TMA:
        return source.load([first, step * BK])
    else:
        row = first + tl.arange(0, BR)
        k = step * BK + tl.arange(0, BK)
        ptrs = source + row.to(tl.int64)[:, None] * K + k[None, :]
        return tl.load(ptrs, mask=(row < rows)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["M"])
def _float_linear(
    x,  # [M, K], with USE_TMA its descriptor
    weight,  # [N, K], likewise
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    WEIGHT_IS_A: tl.constexpr,
    USE_TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    m = (group * GROUP_M + inside % height) * BM
    n = inside // height * BN
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BN, BM) if WEIGHT_IS_A else (BM, BN), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        x_tile = _load(x, m, M, step, K, BM, BK, USE_TMA)
        weight_tile = _load(weight, n, N, step, K, BN, BK, USE_TMA)
        if WEIGHT_IS_A:
            total = tl.dot(weight_tile, x_tile.T, total)
        else:
            total = tl.dot(x_tile, weight_tile.T, total)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if WEIGHT_IS_A:
        total = total.T
    row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    ptrs = y_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)
