"""Products of experts with a plain weight matrix in Triton: float, or 8-bit codes on both sides.

Integer codes are summed exactly in int32, float8 codes in float32. The weight is operand A. Rows of
x are gathered. Legend: K inputs, N outputs of an expert; BM pairs, BN outputs, BK inputs of a tile.
"""

import triton
import triton.language as tl

from qkernels.moe.tiles_triton import clear_part, find_pairs, store_pairs


@triton.jit(do_not_specialize=["P"])
def experts_plain(
    x_ptr,  # [rows, K]
    x_scales_ptr,  # [rows], or [rows, K / BK] with BLOCKS; None: x is not quantized
    weight_ptr,  # [E N, K]
    scales_ptr,  # [E N], or [E N, K / BK] with BLOCKS, or None
    bias_ptr,  # [E, N] or None
    ids_ptr,  # [P]
    sorted_ptr,  # [P], or None if there are few ids
    counts_ptr,  # [E], or None
    weights_ptr,  # [P]
    y_ptr,
    P,
    N,
    K,
    E,
    DTYPE: tl.constexpr,  # of activations
    ROW_PAIRS: tl.constexpr,  # pairs that share a row of x
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,  # a scale for each BK inputs
    EVEN: tl.constexpr,  # BK divides K
    PDL: tl.constexpr,
    TILE: tl.constexpr,
):
    SUM: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32
    block, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert, pair, valid = find_pairs(ids_ptr, sorted_ptr, counts_ptr, block, P, E, BM, TILE)
    if tl.sum(valid.to(tl.int32), 0) > 0:
        n = (expert * N + tile_n * BN + tl.arange(0, BN)).to(tl.int64)
        steps = tl.cdiv(K, BK)
        first = split * steps // SPLIT
        last = (split + 1) * steps // SPLIT
        k = tl.arange(0, BK)
        x_row = (pair // ROW_PAIRS).to(tl.int64)
        x_ptrs = x_ptr + x_row[None, :] * K + k[:, None]
        weight_ptrs = weight_ptr + n[:, None] * K + k[None, :]
        total = tl.zeros((BN, BM), SUM)
        for step in tl.range(first, last, num_stages=STAGES):
            inside = step * BK + k < K if not EVEN else k >= 0
            x = tl.load(x_ptrs + step * BK, mask=valid[None, :] & inside[:, None], other=0.0)
            weight = tl.load(weight_ptrs + step * BK, mask=inside[None, :], other=0.0)
            if BLOCKS:
                x_scales = tl.load(x_scales_ptr + x_row * steps + step, mask=valid, other=0.0)
                scales = tl.load(scales_ptr + n * steps + step)
                product = tl.dot(weight, x, out_dtype=SUM)
                total += product * scales[:, None] * x_scales[None, :]
            elif tl.int32 == SUM:
                total = tl.dot(weight, x, total, out_dtype=SUM)
            else:
                # the tensor core keeps 14 bits of a float8 sum: add it in float32 after each step
                total = tl.dot(weight, x, total, max_num_imprecise_acc=BK, out_dtype=SUM)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        sums = total.to(tl.float32)
        if scales_ptr is not None and not BLOCKS:
            x_scales = tl.load(x_scales_ptr + x_row, mask=valid, other=0.0)
            sums = sums * x_scales[None, :] * tl.load(scales_ptr + n)[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + n).to(tl.float32)
            sums += tl.where(split == 0, bias, 0.0)[:, None]
        store_pairs(sums, y_ptr, weights_ptr, pair, valid, tile_n, split, P, N, DTYPE, BN, BM, TILE)
    elif TILE.partial and TILE.parts:
        clear_part(ids_ptr, y_ptr, block, tile_n, split, P, N, E, BN, TILE)
