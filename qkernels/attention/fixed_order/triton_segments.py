"""Batch-invariant attention in segments of keys, in Triton, for prompt chunks and decode rows.

It runs 8-bit pages on sm_90 and all pages on other GPUs. A segment is 128 keys and starts at a
multiple of 128; a program reads it in steps of up to 64 keys. The largest score, the weights and
the weighted sum of a segment start from zero, so they depend only on the row and the segment. A
row's segments are folded from its last to its first. With enough programs, each one folds the
segments of its rows in registers. Otherwise the segments are stored and merge_segments.py folds
them.

The number of rows in a tile does not change any bit, for these reasons:

- Every step of keys is masked.
- A product with ones adds the weights: tensor cores add in the order of keys, while the order of a
  reduction would depend on the layout.
- Both folds have explicit multiply-adds; otherwise the compiler might fuse them in only one of the
  two.

A segment that a row does not see leaves the row's bits unchanged, so rows that see keys after their
own (`last_keys_T`) fit into the same tiles.

Legend: see qkernels/ops.py; G segments of the longest context.
"""

import torch
import triton
import triton.language as tl

from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.fixed_order.config import (
    SEGMENT_KEYS,
    TileConfig,
    segment_splits,
    tile_config,
)
from qkernels.attention.fixed_order.merge_segments import fold_segment, merge_segments
from qkernels.attention.triton_paged import LOG2_E, add_values, scores_of
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.gpu.row_blocks import request_of


def paged_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    chunk_size: int | None = None,
    config: TileConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Implement ops.paged_attention for rows that see no key after their own.

    `config.block_q` and `splits` do not change any bit.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    settings = {"scale": scale, "window": window, "soft_cap": soft_cap, "chunk_size": chunk_size}
    biases = {"sinks_H": sinks_H, "slopes_H": slopes_H}
    attend_(out_THD, q_THD, cache, step, **settings, **biases, config=config, splits=splits)
    return out_THD


def attend_(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    chunk_size: int | None = None,
    config: TileConfig | None = None,
    splits: int | None = None,
    last_keys_T: torch.Tensor | None = None,
) -> None:
    """Fill `out_THD`. With `last_keys_T`, replace only the rows that see keys after their own."""
    T, H, D = q_THD.shape
    R, J = step.context_lengths_R.shape[0], cache.num_kv_heads
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    if T == 0 or R == 0:
        return
    config = config or tile_config(
        heads_per_kv_head=H // J,
        head_dim=D,
        element_size=q_THD.element_size(),
        # 32 rows of wide heads and their last keys would spill registers
        max_query_len=step.max_query_len if last_keys_T is None or D <= 128 else 1,
    )
    blocks = T // config.block_q + R
    segments = ceil_div(step.max_context_len, SEGMENT_KEYS)
    if last_keys_T is not None:
        splits = 1  # merge_segments folds only the segments up to a row's own key
    if splits is None:
        seen = window or chunk_size
        visible = min(segments, ceil_div(seen, SEGMENT_KEYS) + 1) if seen else segments
        partial_bytes = 4 * T * H * (D + 2) * segments
        splits = segment_splits(blocks * J, visible, partial_bytes, sm_count(q_THD.device))
    partials = sums = None
    if splits > 1:
        partials = out_THD.new_empty((T, H, segments, D), dtype=torch.float32)
        sums = out_THD.new_empty((2, T, H, segments), dtype=torch.float32)
    with on_device(q_THD):
        launch(
            _attend_segments,
            (blocks, J, splits),
            q_THD,
            cache.k_pages,
            cache.v_pages,
            step.block_tables_RX,
            step.query_starts_R1,
            step.context_lengths_R,
            cache.k_scales,
            cache.v_scales,
            out_THD,
            partials,
            sums,
            sinks_H,
            slopes_H,
            last_keys_T,
            R,
            T,
            scale / soft_cap if soft_cap else scale * LOG2_E,
            soft_cap * LOG2_E if soft_cap else 0.0,
            segments,
            *q_THD.stride()[:2],
            *cache.k_pages.stride()[:3],
            *cache.v_pages.stride()[:3],
            *cache.scale_strides,
            step.block_tables_RX.stride(0),
            H=H,
            GROUP=H // J,
            PADDED_GROUP=power_of_two(H // J),
            D=D,
            PADDED_D=max(16, power_of_two(D)),
            B=cache.page_size,
            WINDOW=window or 0,
            CHUNK=chunk_size or 0,
            SOFT_CAP=soft_cap is not None,
            BLOCK_Q=config.block_q,
            KEYS=config.keys,
            SEGMENT=SEGMENT_KEYS,
            STAGES=config.stages,
            num_warps=config.warps,
            **pdl_options(q_THD, T),
        )
    if splits > 1:
        merge_segments(
            *(partials, sums, step, out_THD, sinks_H),
            window=window,
            chunk_size=chunk_size,
            block_q=config.block_q,
        )


@triton.jit(do_not_specialize=["R", "T", "num_segments"])
def _attend_segments(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, B, J, D]
    v_ptr,  # [P, B, J, D]
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    k_scales_ptr,  # [P, B, J] of 8-bit pages, else None
    v_scales_ptr,  # [P, B, J]
    out_ptr,  # [T, H, D], written if a program folds all segments
    partials_ptr,  # [T, H, G, D]: each segment's weighted sum of values; None if programs fold
    sums_ptr,  # [2, T, H, G]: each segment's largest score, and its sum of weights; or None
    sinks_ptr,  # [H], or None
    slopes_ptr,  # [H], or None
    last_keys_ptr,  # [T], or None: rows see keys up to their own
    R,
    T,
    scale,  # makes scores base-2 logarithms, for exp2; with a soft cap, in units of the cap
    cap_log2,  # soft cap as a base-2 logarithm
    num_segments,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kb,
    stride_kj,
    stride_vp,
    stride_vb,
    stride_vj,
    stride_ksp,
    stride_ksb,
    stride_ksj,
    stride_vsp,
    stride_vsb,
    stride_vsj,
    stride_table,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split s of a row block takes its segments last - s, last - s - splits, and so on."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        pdl_launch_and_wait()
    request = request_of(starts_ptr, block, R, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    before = tl.load(lengths_ptr + request) - count  # keys before the request's first row
    first_row = (block - start // BLOCK_Q - request) * BLOCK_Q
    if first_row >= count:
        return

    BLOCK_M: tl.constexpr = BLOCK_Q * PADDED_GROUP
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED_D)
    row = first_row + m // PADDED_GROUP
    head = kv_head * GROUP + m % PADDED_GROUP
    real = (row < count) & (m % PADDED_GROUP < GROUP)
    token = (start + row).to(tl.int64)
    q_ptrs = q_ptr + token * stride_qt + head * stride_qh
    q = tl.load(q_ptrs[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
    out_row = token * H + head

    position = before + row
    last_key = position
    end = before + min(first_row + BLOCK_Q, count)
    is_stored = real
    if last_keys_ptr is not None:
        last_key = tl.load(last_keys_ptr + token, mask=real, other=0).to(tl.int32)
        is_stored = real & (last_key > position)
        if tl.max(is_stored.to(tl.int32), 0) == 0:
            return
        last_key = tl.maximum(last_key, position)
        end = tl.max(tl.where(real, last_key, 0), 0) + 1
    begin = 0
    if WINDOW > 0:
        begin = max(0, before + first_row - WINDOW + 1)
    if CHUNK > 0:
        begin = max(0, before + first_row) // CHUNK * CHUNK
    first_segment, last = begin // SEGMENT, (end - 1) // SEGMENT
    table = tables_ptr + request.to(tl.int64) * stride_table
    k_head, v_head = k_ptr + kv_head * stride_kj, v_ptr + kv_head * stride_vj
    if k_scales_ptr is not None:
        k_scales_head = k_scales_ptr + kv_head * stride_ksj
        v_scales_head = v_scales_ptr + kv_head * stride_vsj
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=m % PADDED_GROUP < GROUP, other=0.0)
        slope *= 1.4426950408889634  # log2(e)
    ones = tl.full([KEYS, 16], 1.0, DTYPE)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
    if sinks_ptr is not None:  # a sink is a key whose value is zero
        sink = tl.load(sinks_ptr + head, mask=m % PADDED_GROUP < GROUP, other=0.0)
        largest = sink * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    splits = tl.num_programs(2)
    for i in tl.range(0, (last - first_segment - split + splits) // splits):
        segment = last - split - i * splits
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weights = tl.zeros([BLOCK_M, 16], tl.float32)  # the same sum in each column
        summed = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
        first = segment * SEGMENT
        for step in tl.range(first, min(first + SEGMENT, end), KEYS, num_stages=STAGES):
            key = step + tl.arange(0, KEYS)
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
            k_scale = None
            v_scale = None
            if k_scales_ptr is not None:
                k_scale_rows = page * stride_ksp + (key % B) * stride_ksb
                v_scale_rows = page * stride_vsp + (key % B) * stride_vsb
                k_scale = tl.load(k_scales_head + k_scale_rows, mask=exists, other=0.0)
                v_scale = tl.load(v_scales_head + v_scale_rows, mask=exists, other=0.0)
            score = scores_of(q, k, k_scale, scale, cap_log2, SOFT_CAP)
            if slopes_ptr is not None:
                distance = (key[None, :] - position[:, None]).to(tl.float32)
                score = tl.fma(tl.broadcast_to(slope[:, None], score.shape), distance, score)
            visible = exists[None, :] & (key[None, :] <= last_key[:, None])
            if WINDOW > 0:
                visible &= key[None, :] > position[:, None] - WINDOW
            if CHUNK > 0:
                visible &= key[None, :] >= (position // CHUNK * CHUNK)[:, None]
            score = tl.where(visible, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            # a row that has seen no key yet: -inf - -inf would be NaN
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - base[:, None])
            shrink = tl.exp2(top - base)[:, None]
            weights = tl.dot(weight.to(DTYPE), ones, weights * shrink, input_precision="ieee")
            v = tl.load(
                v_head + v_rows[:, None] + d[None, :],
                mask=exists[:, None] & (d[None, :] < D),
                other=0.0,
            )
            summed = add_values(weight, v, v_scale, summed * shrink, DTYPE)
            top = new_top
        of_segment = tl.max(weights, 1)
        if partials_ptr is None:
            largest, total, keep, add = fold_segment(largest, total, top, of_segment)
            wide_keep = tl.broadcast_to(keep[:, None], values.shape)
            values = tl.fma(values, wide_keep, summed * add[:, None])
        else:
            split_row = out_row * num_segments + segment
            inside = real[:, None] & (d[None, :] < D)
            tl.store(partials_ptr + split_row[:, None] * D + d[None, :], summed, mask=inside)
            tl.store(sums_ptr + split_row, top, mask=real)
            totals_ptr = sums_ptr + T.to(tl.int64) * H * num_segments
            tl.store(totals_ptr + split_row, of_segment, mask=real)

    if partials_ptr is None:
        inverse = 1.0 / tl.where(total == 0, 1.0, total)
        tl.store(
            out_ptr + out_row[:, None] * D + d[None, :],
            (values * inverse[:, None]).to(out_ptr.dtype.element_ty),
            mask=is_stored[:, None] & (d[None, :] < D),
        )
