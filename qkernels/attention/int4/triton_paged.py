"""Paged attention over 4-bit keys and values: the kernel that attention/triton_paged.py launches.

A byte holds one channel of each half of a head, so scores are the sum of two products over half a
head. Codes of keys are converted to the queries' dtype in registers, exactly. The score of a half
is scale * product + zero * sum, where `sum` is the sum of the query's channels. Values are
dequantized in float32 and rounded to the queries' dtype.

Legend: see attention/triton_paged.py.
"""

import triton
import triton.language as tl

from qkernels.gpu.pdl import pdl_launch_and_wait
from qkernels.gpu.row_blocks import rows_of


@triton.jit(do_not_specialize=["R", "T", "blocks_each"])
def paged_attention_4bit(
    q_ptr,  # [T, H, D], rotated like the keys
    k_ptr,  # [P, B, J, D / 2] bytes
    v_ptr,  # [P, B, J, D / 2]
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    bounds_ptr,  # [2], as AttentionStep.bounds_2
    k_scales_ptr,  # [P, B, J, 4]: scale, zero of the lower channels, then of the upper ones
    v_scales_ptr,  # [P, B, J, 2]: scale, zero
    out_ptr,  # as in _paged_attention
    partials_ptr,
    sums_ptr,
    R,
    T,
    blocks_each,
    scale,
    cap_log2,
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
    sinks_ptr,  # [H], or None
    slopes_ptr,  # [H], or None
    H: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    INPUTS_READY: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL and not INPUTS_READY:
        pdl_launch_and_wait()
    request, start, count, first_row = rows_of(starts_ptr, block, R, blocks_each, BLOCK_Q)
    before = tl.load(lengths_ptr + request) - count  # keys before the request's first row
    is_outside = (request < tl.load(bounds_ptr)) | (request >= tl.load(bounds_ptr + 1))
    if PDL and INPUTS_READY:
        pdl_launch_and_wait()
    if (first_row >= count) | is_outside:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HALF)
    row = first_row + m // PADDED_GROUP
    head = kv_head * GROUP + m % PADDED_GROUP
    real = (row < count) & (m % PADDED_GROUP < GROUP)
    token = (start + row).to(tl.int64)
    q_ptrs = (q_ptr + token * stride_qt + head * stride_qh)[:, None] + d[None, :]
    q_low = tl.load(q_ptrs, mask=real[:, None], other=0.0)
    q_high = tl.load(q_ptrs + HALF, mask=real[:, None], other=0.0)
    sum_low, sum_high = tl.sum(q_low.to(tl.float32), 1), tl.sum(q_high.to(tl.float32), 1)

    position = before + row
    end = before + min(first_row + BLOCK_Q, count)
    begin = 0
    if WINDOW > 0:
        begin = max(0, before + first_row - WINDOW + 1)
    if CHUNK > 0:
        begin = max(0, before + first_row) // CHUNK * CHUNK
    first_step = begin // KEYS
    last_step = (end + KEYS - 1) // KEYS
    if SPLIT > 1:
        steps = (last_step - first_step + SPLIT - 1) // SPLIT
        first_step += split * steps
        last_step = min(last_step, first_step + steps)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    low = tl.zeros([BLOCK_M, HALF], tl.float32)  # sums of values: low and high half of the channels
    high = tl.zeros([BLOCK_M, HALF], tl.float32)
    if sinks_ptr is not None:
        # a sink is a key whose value is zero; it belongs to the first split
        sink = tl.load(sinks_ptr + head, mask=m % PADDED_GROUP < GROUP, other=0.0)
        largest = tl.where(split == 0, sink * 1.4426950408889634, largest)  # log2(e)
        weights = tl.where(split == 0, 1.0, weights)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=m % PADDED_GROUP < GROUP, other=0.0)
        slope *= 1.4426950408889634  # log2(e)
    table = tables_ptr + request.to(tl.int64) * stride_table
    k_head, v_head = k_ptr + kv_head * stride_kj, v_ptr + kv_head * stride_vj
    k_pairs, v_pairs = k_scales_ptr + kv_head * stride_ksj, v_scales_ptr + kv_head * stride_vsj
    # every row of a chunk sees all keys of the steps before its first row: these need no mask
    whole_steps = first_step
    if BLOCK_M >= 64 and WINDOW == 0 and CHUNK == 0 and SPLIT == 1:
        whole_steps = (before + first_row + 1) // KEYS
        for step in tl.range(0, whole_steps, num_stages=STAGES):
            key = step * KEYS + tl.arange(0, KEYS)
            page = tl.load(table + key // B).to(tl.int64)
            k = tl.load(k_head + (page * stride_kp + (key % B) * stride_kb)[None, :] + d[:, None])
            v = tl.load(v_head + (page * stride_vp + (key % B) * stride_vb)[:, None] + d[None, :])
            k_pair = k_pairs + page * stride_ksp + (key % B) * stride_ksb
            v_pair = v_pairs + page * stride_vsp + (key % B) * stride_vsb
            score = _half_scores(q_low, sum_low, k & 15, k_pair, None)
            score += _half_scores(q_high, sum_high, k >> 4, k_pair + 2, None)
            score = _cap_and_bias(score, scale, cap_log2, slope, key, position, SOFT_CAP)
            new_largest = tl.maximum(largest, tl.max(score, 1))
            weight = tl.exp2(score - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            weights = weights * shrink + tl.sum(weight, 1)
            v_scale, v_zero = tl.load(v_pair), tl.load(v_pair + 1)
            weight = weight.to(q_low.dtype)
            low = _add_values(weight, v & 15, v_scale, v_zero, low * shrink[:, None])
            high = _add_values(weight, v >> 4, v_scale, v_zero, high * shrink[:, None])
            largest = new_largest
    for step in tl.range(whole_steps, last_step, num_stages=STAGES):
        key = step * KEYS + tl.arange(0, KEYS)
        # pages outside begin..end may be freed or never written
        exists = (key >= begin) & (key < end)
        page = tl.load(table + key // B, mask=exists, other=0).to(tl.int64)
        k_rows = page * stride_kp + (key % B) * stride_kb
        v_rows = page * stride_vp + (key % B) * stride_vb
        k = tl.load(k_head + k_rows[None, :] + d[:, None], mask=exists[None, :], other=0)
        v = tl.load(v_head + v_rows[:, None] + d[None, :], mask=exists[:, None], other=0)
        k_pair = k_pairs + page * stride_ksp + (key % B) * stride_ksb
        v_pair = v_pairs + page * stride_vsp + (key % B) * stride_vsb
        score = _half_scores(q_low, sum_low, k & 15, k_pair, exists)
        score += _half_scores(q_high, sum_high, k >> 4, k_pair + 2, exists)
        score = _cap_and_bias(score, scale, cap_log2, slope, key, position, SOFT_CAP)
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        if CHUNK > 0:
            visible &= key[None, :] >= (position // CHUNK * CHUNK)[:, None]
        score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        # a row that has seen no key yet: -inf - -inf would be NaN
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        weights = weights * shrink + tl.sum(weight, 1)
        v_scale = tl.load(v_pair, mask=exists, other=0.0)
        v_zero = tl.load(v_pair + 1, mask=exists, other=0.0)
        weight = weight.to(q_low.dtype)
        low = _add_values(weight, v & 15, v_scale, v_zero, low * shrink[:, None])
        high = _add_values(weight, v >> 4, v_scale, v_zero, high * shrink[:, None])
        largest = new_largest

    out_row = token * H + head
    if SPLIT == 1:
        total = tl.where(weights == 0, 1.0, weights)[:, None]
        out = out_ptr + out_row[:, None] * D + d[None, :]
        tl.store(out, (low / total).to(out_ptr.dtype.element_ty), mask=real[:, None])
        tl.store(out + HALF, (high / total).to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        split_row = out_row * SPLIT + split
        out = partials_ptr + split_row[:, None] * D + d[None, :]
        seen = (real & (weights > 0))[:, None]
        tl.store(out, low, mask=seen)
        tl.store(out + HALF, high, mask=seen)
        tl.store(sums_ptr + split_row, largest, mask=real)
        tl.store(sums_ptr + T.to(tl.int64) * H * SPLIT + split_row, weights, mask=real)


@triton.jit
def _half_scores(q, q_sum, nibbles, pairs, exists):
    """Multiply queries and keys over one half of the channels, in float32.

    nibbles: [D / 2, KEYS], code + 8; pairs: pointers [KEYS] to the half's scale and zero.
    """
    if exists is None:
        scale, zero = tl.load(pairs), tl.load(pairs + 1)
    else:
        scale = tl.load(pairs, mask=exists, other=0.0)
        zero = tl.load(pairs + 1, mask=exists, other=0.0)
    score = tl.dot(q, (nibbles.to(tl.int8) - 8).to(q.dtype), input_precision="ieee")
    score *= scale.to(tl.float32)[None, :]
    return score + q_sum[:, None] * zero.to(tl.float32)[None, :]


@triton.jit
def _cap_and_bias(score, scale, cap_log2, slope, key, position, SOFT_CAP: tl.constexpr):
    """Scale scores to base-2 logarithms; apply the soft cap; add slope times distance (ALiBi)."""
    score *= scale
    if SOFT_CAP:  # cap * tanh(score), where exp2 may be 0 or infinite
        score = cap_log2 - 2 * cap_log2 / (1 + tl.exp2(score * 2.8853900817779268))  # 2 log2(e)
    if slope is not None:
        score += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    return score


@triton.jit
def _add_values(weight, nibbles, v_scale, v_zero, values):
    """Add weight times the values of one half of the channels to `values`."""
    v = (nibbles.to(tl.int8) - 8).to(tl.float32) * v_scale.to(tl.float32)[:, None]
    v = (v + v_zero.to(tl.float32)[:, None]).to(weight.dtype)
    return tl.dot(weight, v, values, input_precision="ieee")
