"""Batch-invariant latent attention in segments of keys, in Triton, for chunks and decode rows.

A segment is 256 keys and starts at a multiple of 256. The largest score, the weights and the
weighted sum of a segment start from zero, so they depend only on the row and the segment. A row's
segments are folded from its last to its first. With enough programs, each one folds the segments of
its rows in registers. Otherwise segments are stored and attention/fixed_order/merge_segments.py
folds them.

A product with ones adds the weights: tensor cores add in the order of keys, while the order of a
reduction would depend on the layout. Both folds have explicit multiply-adds; otherwise the compiler
might contract them in one fold only.

Legend: see qkernels/ops.py; E numbers of an entry, L numbers of its latent, G segments of the
longest context.
"""

import torch
import triton
import triton.language as tl

from qkernels.attention.cache import AttentionStep
from qkernels.attention.fixed_order.merge_segments import fold_segment, merge_segments
from qkernels.attention.triton_paged import LOG2_E
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import shared_bytes, sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.gpu.row_blocks import request_of
from qkernels.latent.cache import PagedLatents
from qkernels.latent.fixed_order.config import (
    SEGMENT_KEYS,
    SegmentConfig,
    blocks_of,
    segment_config,
    segment_splits,
)
from qkernels.latent.triton_latent import CODE_FACTOR, entry_starts


def latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    step: AttentionStep,
    *,
    latent_width: int,
    scale: float,
    config: SegmentConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Implement ops.latent_attention.

    `splits` overrides segment_splits; no choice changes a bit.
    """
    (T, H, E), R, L = q_THE.shape, step.context_lengths_R.shape[0], latent_width
    q_THE = q_THE.contiguous()
    out_THL = q_THE.new_empty((T, H, L))
    if T == 0 or R == 0:
        return out_THL
    config = config or segment_config(
        heads=H,
        element_size=q_THE.element_size(),
        shared_bytes=shared_bytes(q_THE.device),
    )
    blocks, of_heads = blocks_of(T, R, H, config)
    segments = ceil_div(step.max_context_len, SEGMENT_KEYS)
    if splits is None:
        partial_bytes = 4 * T * H * (L + 2) * segments
        splits = segment_splits(blocks * of_heads, segments, partial_bytes, sm_count(q_THE.device))
    partials = sums = None
    if splits > 1:
        partials = out_THL.new_empty((T, H, segments, L), dtype=torch.float32)
        sums = out_THL.new_empty((2, T, H, segments), dtype=torch.float32)
    with on_device(q_THE):
        launch(
            _latent_segments,
            (blocks, of_heads, splits),
            q_THE,
            cache.pages,
            cache.scales,
            step.block_tables_RX,
            step.query_starts_R1,
            step.context_lengths_R,
            out_THL,
            partials,
            sums,
            R,
            T,
            scale * LOG2_E,
            step.block_tables_RX.stride(0),
            segments,
            H=H,
            E=E,
            L=L,
            PADDED_L=max(16, power_of_two(L)),
            PADDED_ROPE=max(16, power_of_two(E - L)),
            B=cache.page_size,
            BLOCK_HEADS=config.block_heads,
            BLOCK_Q=config.block_q,
            KEYS=config.keys,
            SEGMENT=SEGMENT_KEYS,
            STAGES=config.stages,
            num_warps=config.warps,
            **pdl_options(q_THE, T),
        )
    if splits > 1:
        merge_segments(
            *(partials, sums, step, out_THL, None),
            window=None,
            block_q=config.block_q,
            segment_keys=SEGMENT_KEYS,
        )
    return out_THL


@triton.jit(do_not_specialize=["R", "T", "num_segments"])
def _latent_segments(
    q_ptr,  # [T, H, E]
    pages_ptr,  # [P, B, E]
    scales_ptr,  # [P, B, 2] of latents and of keys with 8-bit pages, else None
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, H, L], written if a program folds all segments
    partials_ptr,  # [T, H, G, L]: each segment's weighted sum of values; None if programs fold
    sums_ptr,  # [2, T, H, G]: each segment's largest score, and its sum of weights; or None
    R,
    T,
    scale,  # makes scores base-2 logarithms, for exp2
    stride_table,
    num_segments,
    H: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    PADDED_L: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    B: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split s of a row block takes its segments last - s, last - s - splits, and so on."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    block, heads, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        pdl_launch_and_wait()
    request = request_of(starts_ptr, block, R, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    before = tl.load(lengths_ptr + request) - count  # keys before the request's first row
    first_row = (block - start // BLOCK_Q - request) * BLOCK_Q
    if first_row >= count:
        return

    BLOCK_M: tl.constexpr = BLOCK_Q * BLOCK_HEADS
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, PADDED_L)
    r = tl.arange(0, PADDED_ROPE)
    row = first_row + m // BLOCK_HEADS
    head = heads * BLOCK_HEADS + m % BLOCK_HEADS
    real = (row < count) & (head < H)
    out_row = (start + row).to(tl.int64) * H + head
    q_ptrs = q_ptr + out_row[:, None] * E
    q_latent = tl.load(q_ptrs + c[None, :], mask=real[:, None] & (c < L)[None, :], other=0.0)
    of_rope = (r < E - L)[None, :]
    q_rope = tl.load(q_ptrs + L + r[None, :], mask=real[:, None] & of_rope, other=0.0)

    position = before + row
    end = before + min(first_row + BLOCK_Q, count)
    last = (end - 1) // SEGMENT
    table = tables_ptr + request.to(tl.int64) * stride_table
    ones = tl.full([KEYS, 16], 1.0, DTYPE)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, PADDED_L], tl.float32)
    splits = tl.num_programs(2)
    for i in tl.range(0, (last - split + splits) // splits):
        segment = last - split - i * splits
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weights = tl.zeros([BLOCK_M, 16], tl.float32)  # the same sum in each column
        summed = tl.zeros([BLOCK_M, PADDED_L], tl.float32)
        first = segment * SEGMENT
        for step in tl.range(first, min(first + SEGMENT, end), KEYS, num_stages=STAGES):
            key = step + tl.arange(0, KEYS)
            exists = key < end  # pages beyond may be freed or never written
            page = tl.load(table + key // B, mask=exists, other=0).to(tl.int64)
            slot = page * B + key % B
            entries = pages_ptr + entry_starts(slot, page, key % B, B, E)
            inside = exists[:, None] & (c < L)[None, :]
            latent = tl.load(entries + c[None, :], mask=inside, other=0.0).to(DTYPE)
            rope = tl.load(entries + L + r[None, :], mask=exists[:, None] & of_rope, other=0.0)
            rope = rope.to(DTYPE)
            score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            if scales_ptr is None:
                score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale
            else:  # scores of codes times the scales of their keys
                latent_scale = tl.load(scales_ptr + slot * 2, mask=exists, other=0.0)
                rope_scale = tl.load(scales_ptr + slot * 2 + 1, mask=exists, other=0.0)
                rope_score = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
                rope_score *= rope_scale[None, :]
                wide_scale = tl.broadcast_to(latent_scale[None, :], score.shape)
                score = tl.fma(score, wide_scale, rope_score) * scale
            visible = exists[None, :] & (key[None, :] <= position[:, None])
            score = tl.where(visible, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            # a row that has seen no key yet: -inf - -inf would be NaN
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - base[:, None])
            shrink = tl.exp2(top - base)[:, None]
            weights = tl.dot(weight.to(DTYPE), ones, weights * shrink, input_precision="ieee")
            if scales_ptr is not None:
                weight *= latent_scale[None, :] * CODE_FACTOR
            summed = tl.dot(weight.to(DTYPE), latent, summed * shrink, input_precision="ieee")
            top = new_top
        of_segment = tl.max(weights, 1)
        if scales_ptr is not None:
            summed *= 1.0 / CODE_FACTOR
        if partials_ptr is None:
            largest, total, keep, add = fold_segment(largest, total, top, of_segment)
            wide_keep = tl.broadcast_to(keep[:, None], values.shape)
            values = tl.fma(values, wide_keep, summed * add[:, None])
        else:
            split_row = out_row * num_segments + segment
            inside = real[:, None] & (c < L)[None, :]
            tl.store(partials_ptr + split_row[:, None] * L + c[None, :], summed, mask=inside)
            tl.store(sums_ptr + split_row, top, mask=real)
            totals_ptr = sums_ptr + T.to(tl.int64) * H * num_segments
            tl.store(totals_ptr + split_row, of_segment, mask=real)

    if partials_ptr is None:
        inverse = 1.0 / tl.where(total == 0, 1.0, total)
        out = values * inverse[:, None]
        tl.store(
            out_ptr + out_row[:, None] * L + c[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & (c < L)[None, :],
        )
