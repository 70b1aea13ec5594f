"""Causal attention over paged keys and values, chunks and decode rows in one batch, in Triton.

Knows no scheduler. One block does block_q query rows of all heads that share a KV head, stacked
into the rows of one product. A batch of few rows is split over the keys as well; a second kernel
merges the parts. The host reads nothing from the device: grids follow from shapes and the given
maxima.

Legend: T tokens of a step, R requests, H query heads, J KV heads, D head dim, P pages, B tokens of
a page, X pages of a block table; S parts of a context.
"""

import math

import torch
import triton
import triton.language as tl

from qkernels.launch import on_device, sm_count, tile_table_of
from qkernels.tiles import AttentionTile, attention_tile, ceil_div, power_of_two


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    block_tables_RX: torch.Tensor,
    query_starts_R1: torch.Tensor,
    context_lengths_R: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    max_context_len: int,
    tile: AttentionTile | None = None,
) -> torch.Tensor:
    """As ops.paged_attention; `tile` replaces the choice of tiles.py."""
    T, H, D = q_THD.shape
    R, J = context_lengths_R.shape[0], k_pages_PBJD.shape[2]
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    if T == 0 or R == 0:
        return out_THD
    if tile is None:
        problem = {
            "num_requests": R,
            "num_kv_heads": J,
            "heads_per_kv_head": H // J,
            "head_dim": D,
            "element_size": q_THD.element_size(),
            "max_query_len": max_query_len,
            "max_context_len": max_context_len,
            "window": window,
        }
        row = tile_table_of(q_THD.device).find("paged_attention", **problem)
        tile = row.tile if row else attention_tile(**problem, sm_count=sm_count(q_THD.device))
    partials = sums = None
    if tile.split > 1:
        partials = out_THD.new_empty((T, H, tile.split, D), dtype=torch.float32)
        sums = out_THD.new_empty((2, T, H, tile.split), dtype=torch.float32)
    # Request r owns the blocks from query_starts[r] // block_q + r on, at least as many as its rows
    # need, so the grid follows from T and R alone.
    grid = (T // tile.block_q + R, J, tile.split)
    strides = (*k_pages_PBJD.stride()[:3], *v_pages_PBJD.stride()[:3])
    with on_device(q_THD):
        _paged_attention[grid](
            q_THD,
            k_pages_PBJD,
            v_pages_PBJD,
            block_tables_RX,
            query_starts_R1,
            context_lengths_R,
            out_THD,
            partials,
            sums,
            R,
            T,
            scale * math.log2(math.e),
            q_THD.stride(0),
            q_THD.stride(1),
            *strides,
            block_tables_RX.stride(0),
            H=H,
            GROUP=H // J,
            PADDED_GROUP=tile.block_m // tile.block_q,
            D=D,
            PADDED_D=max(16, power_of_two(D)),
            B=k_pages_PBJD.shape[1],
            WINDOW=window or 0,
            ALIGNED=all(stride % 8 == 0 for stride in strides),
            BLOCK_M=tile.block_m,
            BLOCK_Q=tile.block_q,
            KEYS=tile.keys,
            SPLIT=tile.split,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
        if tile.split > 1:
            _merge_parts[(T, H)](
                partials,
                sums,
                query_starts_R1,
                out_THD,
                R,
                T,
                H=H,
                D=D,
                PADDED_D=power_of_two(D),
                SPLIT=tile.split,
                num_warps=ceil_div(power_of_two(D) * tile.split, 1024),
            )
    return out_THD


@triton.jit(do_not_specialize=["R", "T"])
def _paged_attention(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, B, J, D]
    v_ptr,  # [P, B, J, D]
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, H, D], when SPLIT is 1
    partials_ptr,  # [T, H, S, D], otherwise: each part's weighted sum of values
    sums_ptr,  # [2, T, H, S]: each part's largest score, and its sum of weights
    R,
    T,
    scale_log2,  # scores in powers of two, since exp2 is the hardware's
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kb,
    stride_kj,
    stride_vp,
    stride_vb,
    stride_vj,
    stride_table,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    block, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    low = 0
    high = R
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    first_row = (block - start // BLOCK_Q - request) * BLOCK_Q
    if first_row >= count:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED_D)
    row = first_row + m // PADDED_GROUP
    head = kv_head * GROUP + m % PADDED_GROUP
    real = (row < count) & (m % PADDED_GROUP < GROUP)
    token = (start + row).to(tl.int64)
    q_ptrs = q_ptr + token * stride_qt + head * stride_qh
    q = tl.load(q_ptrs[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)

    before = tl.load(lengths_ptr + request) - count  # keys before the request's first row
    position = before + row
    end = before + min(first_row + BLOCK_Q, count)
    begin = 0
    if WINDOW > 0:
        begin = max(0, before + first_row - WINDOW + 1)
    first_step = begin // KEYS
    last_step = (end + KEYS - 1) // KEYS
    if SPLIT > 1:
        steps = (last_step - first_step + SPLIT - 1) // SPLIT
        first_step += part * steps
        last_step = min(last_step, first_step + steps)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
    table = tables_ptr + request.to(tl.int64) * stride_table
    k_head, v_head = k_ptr + kv_head * stride_kj, v_ptr + kv_head * stride_vj
    if BLOCK_M >= 64 and WINDOW == 0 and SPLIT == 1:
        # a chunk's first row sees all keys of these steps, so every row does
        whole_steps = (before + first_row + 1) // KEYS
        for step in tl.range(0, whole_steps, num_stages=STAGES):
            if B >= KEYS:
                page = tl.load(table + step * KEYS // B).to(tl.int64)
                offset = step * KEYS % B + tl.arange(0, KEYS)
                k_rows = page * stride_kp + offset * stride_kb
                v_rows = page * stride_vp + offset * stride_vb
            else:
                # one load for each page, not for each key: 409 instructions a step, not 480
                pages = step * (KEYS // B) + tl.arange(0, KEYS // B)
                page = tl.load(table + pages).to(tl.int64)[:, None]
                offset = tl.arange(0, B)[None, :]
                k_rows = (page * stride_kp + offset * stride_kb).reshape(KEYS)
                v_rows = (page * stride_vp + offset * stride_vb).reshape(KEYS)
            if ALIGNED:  # a reshape forgets it
                k_rows = tl.multiple_of(k_rows, 8)
                v_rows = tl.multiple_of(v_rows, 8)
            if D == PADDED_D:
                k = tl.load(k_head + k_rows[None, :] + d[:, None])
                v = tl.load(v_head + v_rows[:, None] + d[None, :])
            else:
                k = tl.load(k_head + k_rows[None, :] + d[:, None], mask=d[:, None] < D, other=0.0)
                v = tl.load(v_head + v_rows[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
            score = tl.dot(q, k, input_precision="ieee")
            new_largest = tl.maximum(largest, tl.max(score, 1) * scale_log2)
            weight = tl.exp2(score * scale_log2 - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            weights = weights * shrink + tl.sum(weight, 1)
            values = values * shrink[:, None]
            values = tl.dot(weight.to(v.dtype), v, values, input_precision="ieee")
            largest = new_largest
        first_step = whole_steps
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        key = step * KEYS + tl.arange(0, KEYS)
        # pages outside begin..end may be freed or never written
        exists = (key >= begin) & (key < end)
        page = tl.load(table + key // B, mask=exists, other=0).to(tl.int64)
        k_rows = page * stride_kp + (key % B) * stride_kb
        v_rows = page * stride_vp + (key % B) * stride_vb
        k = tl.load(
            k_head + k_rows[None, :] + d[:, None],
            mask=exists[None, :] & (d[:, None] < D),
            other=0.0,
        )
        score = tl.dot(q, k, input_precision="ieee") * scale_log2
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        # a row that has seen no key yet: -inf - -inf would be NaN
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        weights = weights * shrink + tl.sum(weight, 1)
        v = tl.load(
            v_head + v_rows[:, None] + d[None, :],
            mask=exists[:, None] & (d[None, :] < D),
            other=0.0,
        )
        values = values * shrink[:, None]
        values = tl.dot(weight.to(v.dtype), v, values, input_precision="ieee")
        largest = new_largest

    out_row = token * H + head
    if SPLIT == 1:
        out = values / tl.where(weights == 0, 1.0, weights)[:, None]
        tl.store(
            out_ptr + out_row[:, None] * D + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & (d[None, :] < D),
        )
    else:
        part_row = out_row * SPLIT + part
        tl.store(
            partials_ptr + part_row[:, None] * D + d[None, :],
            values,
            mask=(real & (weights > 0))[:, None] & (d[None, :] < D),
        )
        tl.store(sums_ptr + part_row, largest, mask=real)
        tl.store(sums_ptr + T.to(tl.int64) * H * SPLIT + part_row, weights, mask=real)


@triton.jit(do_not_specialize=["R", "T"])
def _merge_parts(
    partials_ptr,
    sums_ptr,
    starts_ptr,
    out_ptr,
    R,
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token >= tl.load(starts_ptr + R):
        return
    s = tl.arange(0, SPLIT)
    d = tl.arange(0, PADDED_D)
    row = (token * H + head) * SPLIT + s
    weights = tl.load(sums_ptr + T.to(tl.int64) * H * SPLIT + row)
    seen = weights > 0  # the other parts are empty: their values were not written
    # a finite stand-in for -inf, since -inf - -inf would be NaN where no part has seen a key
    largest = tl.where(seen, tl.load(sums_ptr + row), -3.0e38)
    shift = tl.exp2(largest - tl.max(largest, 0))
    partials = tl.load(
        partials_ptr + row[:, None] * D + d[None, :],
        mask=seen[:, None] & (d[None, :] < D),
        other=0.0,
    )
    total = tl.sum(weights * shift, 0)
    out = tl.sum(partials * shift[:, None], 0) / tl.where(total == 0, 1.0, total)
    out_row = token * H + head
    tl.store(out_ptr + out_row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
