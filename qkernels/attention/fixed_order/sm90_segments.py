"""Batch-invariant attention of few query rows over 16-bit pages, for sm_90, in Gluon.

A segment is 128 keys that begin at a multiple of 128, the same as a step of sm90_prefill.py. Its
scores, their maximum, the weights, their sum and the weighted sum of values depend only on the row
and the segment. A row's segments are folded from its last to its first (sm90_fold.py). If that
gives too few programs, several programs share a row's segments and merge_segments.py folds them.

A program is one warp, so that its reductions have the same order as in sm90_prefill.py; mma.sync
adds in the same order as wgmma. Legend: see qkernels/ops.py; M padded rows (16), G segments of the
longest context.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.fixed_order.config import SEGMENT_KEYS, SEGMENT_ROWS, segment_splits
from qkernels.attention.fixed_order.merge_segments import merge_segments
from qkernels.attention.fixed_order.sm90_fold import fold_factors, fold_values
from qkernels.attention.sm90_decode_8bit import request_of
from qkernels.attention.sm90_prefill import boxes
from qkernels.attention.sm90_prefill_load import load_step, zero_tail
from qkernels.attention.sm90_prefill_mma import capped
from qkernels.attention.triton_paged import LOG2_E
from qkernels.gpu.config import ceil_div, power_of_two
from qkernels.gpu.device import sm_count
from qkernels.gpu.gluon_compat import aggregate, integer
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pipeline import make_pipeline

KEYS = gl.constexpr(SEGMENT_KEYS)
M = gl.constexpr(SEGMENT_ROWS)
LOG2_E_OF_SINKS = gl.constexpr(LOG2_E)


def paged_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Implement ops.paged_attention over 16-bit pages; `splits` overrides segment_splits."""
    T, H, D = q_THD.shape
    R, J = step.context_lengths_R.shape[0], cache.num_kv_heads
    out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    if T == 0 or R == 0:
        return out_THD
    if cache.k_pages.shape[0] == 0:
        return out_THD.zero_()
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    group = power_of_two(H // J)
    block_q = SEGMENT_ROWS // group
    num_segments = ceil_div(step.max_context_len, SEGMENT_KEYS)
    blocks = T // block_q + R
    if splits is None:
        visible = min(num_segments, ceil_div(window, SEGMENT_KEYS) + 1 if window else num_segments)
        partial_bytes = 4 * T * H * (D + 2) * num_segments
        splits = segment_splits(blocks * J, visible, partial_bytes, sm_count(q_THD.device))
    partials = sums = None
    if splits > 1:
        partials = out_THD.new_empty((T, H, num_segments, D), dtype=torch.float32)
        sums = out_THD.new_empty((2, T, H, num_segments), dtype=torch.float32)
    padded_d = max(64, power_of_two(D))
    with on_device(q_THD):
        launch(
            _attend_segments,
            (J, blocks, splits),
            q_THD,
            boxes(cache.k_pages, padded_d),
            boxes(cache.v_pages, padded_d),
            step.block_tables_RX,
            step.query_starts_R1,
            step.context_lengths_R,
            out_THD,
            partials,
            sums,
            sinks_H,
            R,
            T,
            scale / soft_cap if soft_cap else scale * LOG2_E,
            soft_cap * LOG2_E if soft_cap else 0.0,
            window or 0,
            num_segments,
            q_THD.stride(0),
            q_THD.stride(1),
            step.block_tables_RX.stride(0),
            H=H,
            GROUP=H // J,
            PADDED_GROUP=group,
            D=D,
            PADDED_D=padded_d,
            B=cache.page_size,
            WINDOWED=window is not None,
            SOFT_CAP=soft_cap is not None,
            SPLITS=splits,
            num_warps=1,
        )
    if splits > 1:
        merge_segments(partials, sums, step, out_THD, sinks_H, window=window, block_q=block_q)
    return out_THD


@aggregate
class Pages:
    """The pages of one request and one KV head."""

    table: gl.tensor
    kv_head: gl.tensor
    begin: integer  # first key that may be read
    length: gl.tensor  # keys of the context
    B: gl.constexpr

    @gluon.jit
    def load(self, desc, pipeline, count, segment):
        """Start the TMA loads of a segment's keys or values into the stage of load `count`."""
        pages = ()
        for b in gl.static_range(KEYS // self.B):
            key = segment * KEYS + b * self.B
            # TMA writes zeros if a coordinate is outside of the pool
            page = desc.shape[0]
            if (key < self.length) & (key + self.B > self.begin):
                page = gl.load(self.table + key // self.B)
            pages = pages + (page,)
        load_step(desc, pipeline, count, pages, self.kv_head, KEYS, self.B)


@gluon.jit(do_not_specialize=["R", "T", "window", "num_segments", "stride_table"])
def _attend_segments(
    q_ptr,  # [T, H, D]
    k_desc,  # [P, B, J, D], boxes of a page, a head and 64 channels
    v_desc,
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    out_ptr,  # [T, H, D], where SPLITS is 1
    partials_ptr,  # [T, H, G, D], otherwise: each segment's weighted sum of values
    sums_ptr,  # [2, T, H, G]: each segment's largest score, and its sum of weights
    sinks_ptr,  # [H], or None
    R,
    T,
    scale,  # as in sm90_prefill_structs.Attention
    cap_log2,
    window,
    num_segments,
    stride_qt,
    stride_qh,
    stride_table,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED_GROUP: gl.constexpr,
    D: gl.constexpr,
    PADDED_D: gl.constexpr,
    B: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Split s of a row block takes its segments last - 1 - s, last - 1 - s - SPLITS, and so on."""
    BLOCK_Q: gl.constexpr = M // PADDED_GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # the heads of a request run at the same time: their rows are neighbours in memory
    kv_head, block, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    request = request_of(starts_ptr, block, R, BLOCK_Q)
    start = gl.load(starts_ptr + request)
    count = gl.load(starts_ptr + request + 1) - start
    first_row = (block - start // BLOCK_Q - request) * BLOCK_Q
    if first_row >= count:
        return
    length = gl.load(lengths_ptr + request)
    before = length - count
    begin = 0
    if WINDOWED:
        begin = gl.maximum(0, before + first_row - window + 1)
    last = (before + gl.minimum(first_row + BLOCK_Q, count) + KEYS - 1) // KEYS
    num_steps = (last - begin // KEYS - split + SPLITS - 1) // SPLITS
    if num_steps <= 0:
        return

    memory: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k = make_pipeline(gl.allocate_shared_memory(dtype, [1, KEYS, PADDED_D], memory), 1, 1)
    v = make_pipeline(gl.allocate_shared_memory(dtype, [1, KEYS, PADDED_D], memory), 1, 1)
    fence_async_shared()
    pages = Pages(
        table=tables_ptr + request.to(gl.int64) * stride_table,
        kv_head=kv_head,
        begin=begin,
        length=length,
        B=B,
    )
    pages.load(k_desc, k, gl.to_tensor(0), last - 1 - split)
    pages.load(v_desc, v, gl.to_tensor(0), last - 1 - split)

    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]
    )
    OPERAND_A: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    OPERAND_B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    m = gl.arange(0, M, gl.SliceLayout(1, OPERAND_A))
    d = gl.arange(0, PADDED_D, gl.SliceLayout(0, OPERAND_A))
    row = first_row + m // PADDED_GROUP
    real = (row < count) & (m % PADDED_GROUP < GROUP)
    offset = (start + row).to(gl.int64) * stride_qt
    offset += (kv_head * GROUP + m % PADDED_GROUP) * stride_qh
    mask = real[:, None] & (d < D)[None, :]
    q = gl.load(q_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)

    m = gl.arange(0, M, ROWS)
    row = first_row + m // PADDED_GROUP
    real = (row < count) & (m % PADDED_GROUP < GROUP)
    out_row = (start + row).to(gl.int64) * H + kv_head * GROUP + m % PADDED_GROUP
    d = gl.arange(0, PADDED_D, gl.SliceLayout(0, PRODUCT))
    mask = real[:, None] & (d < D)[None, :]
    key = gl.arange(0, KEYS, gl.SliceLayout(0, PRODUCT))
    largest = gl.full([M], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([M], gl.float32, ROWS)
    if sinks_ptr is not None:
        head = kv_head * GROUP + gl.minimum(m % PADDED_GROUP, GROUP - 1)
        largest = gl.load(sinks_ptr + head) * LOG2_E_OF_SINKS
        total = gl.full([M], 1.0, gl.float32, ROWS)
    values = gl.zeros([M, PADDED_D], gl.float32, PRODUCT)
    for i in range(num_steps):
        segment = last - 1 - split - i * SPLITS
        k.consumer_wait(k.consumer_at(i))
        keys = k.mem.index(0).permute([1, 0]).load(OPERAND_B)
        score = mma_v2(q, keys, gl.zeros([M, KEYS], gl.float32, PRODUCT))
        k.consumer_release(k.consumer_at(i))
        if i + 1 < num_steps:
            pages.load(k_desc, k, i + 1, segment - SPLITS)
        factor = scale
        if SOFT_CAP:
            score = capped(score, cap_log2, scale)
            factor = 1.0
        last_key = (before + row - segment * KEYS)[:, None]
        visible = key[None, :] <= last_key
        if WINDOWED:
            visible &= key[None, :] > last_key - window
        score = gl.where(visible, score, float("-inf"))
        top = gl.max(score, 1) * factor
        base = gl.where(top == float("-inf"), 0.0, top)
        weight = gl.exp2(gl.fma(score, factor, -base[:, None]))
        of_segment = gl.sum(weight, 1)
        weight = gl.convert_layout(weight.to(dtype), OPERAND_A)
        v.consumer_wait(v.consumer_at(i))
        if (length < (segment + 1) * KEYS) & (length % B > 0):
            zero_tail(v, i, length, B)
        rows = v.mem.index(0).load(OPERAND_B)
        summed = mma_v2(weight, rows, gl.zeros([M, PADDED_D], gl.float32, PRODUCT))
        v.consumer_release(v.consumer_at(i))
        if i + 1 < num_steps:
            pages.load(v_desc, v, i + 1, segment - SPLITS)
        if SPLITS == 1:
            largest, keep, add = fold_factors(largest, top)
            total = gl.fma(total, keep, of_segment * add)
            values = fold_values(values, keep, summed, add)
        else:
            split_row = out_row * num_segments + segment
            ptrs = partials_ptr + split_row[:, None] * D + d[None, :]
            gl.store(ptrs, summed, mask=mask)
            gl.store(sums_ptr + split_row, top, mask=real)
            totals_ptr = sums_ptr + T.to(gl.int64) * H * num_segments
            gl.store(totals_ptr + split_row, of_segment, mask=real)
    if SPLITS == 1:
        inverse = 1.0 / gl.where(total == 0, 1.0, total)
        out = (values * inverse[:, None]).to(dtype)
        gl.store(out_ptr + out_row[:, None] * D + d[None, :], out, mask=mask)
