"""Latent attention over paged entries in Triton, for chunks and decode rows in one batch.

All heads read the same entries: a program computes block_q query rows of up to 32 heads, stacked
into the rows of one product, and reads each entry once, as key and as value. If that gives too few
programs, split-KV divides the context. The host reads nothing from the device: grids follow from
shapes and the given maxima.

Legend: see latent/ops.py; X pages of a block table, S splits of a context.
"""

import torch
import triton
import triton.language as tl

from qkernels.attention.cache import AttentionStep
from qkernels.attention.merge_splits import merge_splits
from qkernels.attention.triton_paged import LOG2_E
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import shared_bytes, sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.gpu.row_blocks import request_of
from qkernels.latent.cache import PagedLatents
from qkernels.latent.config import LatentConfig, default_latent_config

# Multiplies the float16 products of weights and code scales, to keep them out of the range of small
# numbers, where float16 is less exact.
CODE_FACTOR = tl.constexpr(64.0)


def latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    step: AttentionStep,
    *,
    latent_width: int,
    scale: float,
    config: LatentConfig | None = None,
) -> torch.Tensor:
    """Implement ops.latent_attention; `config` replaces the default one."""
    (T, H, E), R, L = q_THE.shape, step.context_lengths_R.shape[0], latent_width
    q_THE = q_THE.contiguous()
    out_THL = q_THE.new_empty((T, H, L))
    if T == 0 or R == 0:
        return out_THL
    if config is None:
        config = default_latent_config(
            num_requests=R,
            heads=H,
            element_size=q_THE.element_size(),
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            sm_count=sm_count(q_THE.device),
            shared_bytes=shared_bytes(q_THE.device),
            entry=E,
        )
    partials = sums = None
    if config.split > 1:
        partials = out_THL.new_empty((T, H, config.split, L), dtype=torch.float32)
        sums = out_THL.new_empty((2, T, H, config.split), dtype=torch.float32)
    # Request r owns the blocks from query_starts[r] // block_q + r on, as in paged attention.
    grid = (T // config.block_q + R, ceil_div(H, config.block_heads), config.split)
    with on_device(q_THE):
        launch(
            _latent_attention,
            grid,
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
            H=H,
            E=E,
            L=L,
            PADDED_L=max(16, power_of_two(L)),
            PADDED_ROPE=max(16, power_of_two(E - L)),
            B=cache.page_size,
            BLOCK_HEADS=config.block_heads,
            BLOCK_Q=config.block_q,
            KEYS=config.keys,
            SPLIT=config.split,
            STAGES=config.stages,
            num_warps=config.warps,
            **pdl_options(q_THE, T),
        )
    if config.split == 1:
        return out_THL
    return merge_splits(partials, sums, step.query_starts_R1, out_THL, None)


@triton.jit
def entry_starts(slot, page, offset, B: tl.constexpr, E: tl.constexpr):
    """Return the index of the first number of each entry, [keys, 1]. A slot is page * B + offset.

    Triton 3.6 takes a slot for a multiple of B, and so 44 times that for a multiple of 8, which
    begins at a multiple of 16 bytes.
    """
    if E % 16 == 0:
        return slot[:, None] * E
    return page[:, None] * (B * E) + offset[:, None] * E


@triton.jit(do_not_specialize=["R", "T"])
def _latent_attention(
    q_ptr,  # [T, H, E]
    pages_ptr,  # [P, B, E]
    scales_ptr,  # [P, B, 2] of latents and of keys with 8-bit pages, else None
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, H, L], written if SPLIT is 1
    partials_ptr,  # [T, H, S, L], written otherwise: each split's weighted sum of values
    sums_ptr,  # [2, T, H, S]: each split's largest score, and its sum of weights
    R,
    T,
    scale,  # makes scores base-2 logarithms, for exp2
    stride_table,
    H: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    PADDED_L: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    B: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
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
    first_step = 0
    last_step = (end + KEYS - 1) // KEYS
    if SPLIT > 1:
        steps = (last_step + SPLIT - 1) // SPLIT
        first_step = split * steps
        last_step = min(last_step, first_step + steps)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, PADDED_L], tl.float32)
    table = tables_ptr + request.to(tl.int64) * stride_table
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        key = step * KEYS + tl.arange(0, KEYS)
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
            score = score * latent_scale[None, :] + rope_score * rope_scale[None, :]
            score *= scale
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        # a row that has seen no key yet: -inf - -inf would be NaN
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        weights = weights * shrink + tl.sum(weight, 1)
        if scales_ptr is not None:
            weight *= latent_scale[None, :] * CODE_FACTOR
        values = tl.dot(weight.to(DTYPE), latent, values * shrink[:, None], input_precision="ieee")
        largest = new_largest

    if scales_ptr is not None:
        values *= 1.0 / CODE_FACTOR
    if SPLIT == 1:
        out = values / tl.where(weights == 0, 1.0, weights)[:, None]
        tl.store(
            out_ptr + out_row[:, None] * L + c[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & (c < L)[None, :],
        )
    else:
        split_row = out_row * SPLIT + split
        tl.store(
            partials_ptr + split_row[:, None] * L + c[None, :],
            values,
            mask=(real & (weights > 0))[:, None] & (c < L)[None, :],
        )
        tl.store(sums_ptr + split_row, largest, mask=real)
        tl.store(sums_ptr + T.to(tl.int64) * H * SPLIT + split_row, weights, mask=real)
