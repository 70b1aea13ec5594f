"""Causal attention over paged keys and values in Triton, for chunks and decode rows in one batch.

8-bit keys and values are converted to the queries' dtype in registers, exactly; their scales
multiply the scores and the weights. 4-bit codes have their own kernel (int4/triton_paged.py).

A block computes block_q query rows of all heads that share a KV head, stacked into the rows of one
product. If that gives too few blocks, split-KV divides the context, and merge_splits.py merges the
splits. The host reads nothing from the device: grids follow from shapes and the given maxima.

Legend: see qkernels/ops.py; S splits of a context.
"""

import math

import torch
import triton
import triton.language as tl

from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.config import AttentionConfig, default_attention_config
from qkernels.attention.int4.triton_paged import paged_attention_4bit
from qkernels.attention.merge_splits import merge_splits
from qkernels.attention.tuned import TUNED
from qkernels.gpu import device as gpu_device
from qkernels.gpu.config import power_of_two
from qkernels.gpu.device import sm_count
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options
from qkernels.gpu.row_blocks import row_grid, rows_of
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.tuning.table import tuning_table_of

LOG2_E = math.log2(math.e)


def paged_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    limbs: LimbForm | None = None,
    inputs_ready: bool = False,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    chunk_size: int | None = None,
    out_THD: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> torch.Tensor | Limbs:
    """Implement ops.paged_attention; `config` replaces the tuned or default one.

    `out_THD`: contiguous, written instead of a new tensor.
    """
    T, H, D = q_THD.shape
    R, J = step.context_lengths_R.shape[0], cache.num_kv_heads
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    if out_THD is None:
        out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    if T == 0 or R == 0:
        return out_THD
    splits = step.bounds_2 is None  # merge_splits would write the rows of all requests
    if config is None:
        problem = {
            "num_requests": R,
            "num_kv_heads": J,
            "heads_per_kv_head": H // J,
            "head_dim": D,
            "element_size": q_THD.element_size(),
            "max_query_len": step.max_query_len,
            "max_context_len": step.max_context_len,
            "window": window or chunk_size,
        }
        row = None  # tables have configs for pages of the queries' own dtype only
        if cache.k_scales is None:
            row = tuning_table_of(q_THD.device).find(TUNED, **problem)
        config = row.config if row and (splits or row.config.split == 1) else None
    if config is None:
        config = default_attention_config(
            **problem,
            page_element_size=cache.k_pages.element_size(),
            sm_count=sm_count(q_THD.device),
            int4=cache.is_4bit,
            splits=splits,
            gluon=not (has_options(sinks_H, slopes_H, chunk_size) or gluon_refuses(q_THD, cache)),
        )
    partials = sums = None
    if config.split > 1:
        partials = out_THD.new_empty((T, H, config.split, D), dtype=torch.float32)
        sums = out_THD.new_empty((2, T, H, config.split), dtype=torch.float32)
    rows = min(T, R * step.max_query_len)  # that are computed, at most
    blocks, blocks_each = row_grid(T, R, step.max_query_len, config.block_q)
    grid = (blocks, J, config.split)
    strides = (*cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3])
    shared = (
        step.block_tables_RX,
        step.query_starts_R1,
        step.context_lengths_R,
        step.bounds_on(q_THD.device),
        cache.k_scales,
        cache.v_scales,
        out_THD,
        partials,
        sums,
        R,
        T,
        blocks_each,
        scale / soft_cap if soft_cap else scale * LOG2_E,
        soft_cap * LOG2_E if soft_cap else 0.0,
        q_THD.stride(0),
        q_THD.stride(1),
    )
    constants = {
        "H": H,
        "GROUP": H // J,
        "PADDED_GROUP": config.block_m // config.block_q,
        "D": D,
        "B": cache.page_size,
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap is not None,
        "SPLIT": config.split,
    }
    with on_device(q_THD):
        if config.gluon:
            from qkernels.attention import sm90_decode_8bit

            sm90_decode_8bit.attend(
                grid,
                q_THD,
                cache,
                shared,
                step.block_tables_RX.stride(0),
                constants,
                config,
                inputs_ready,
                rows,
            )
        else:
            padding = {"PADDED_D": max(16, power_of_two(D)), "ALIGNMENT": alignment(*strides)}
            launch(
                paged_attention_4bit if cache.is_4bit else _paged_attention,
                grid,
                q_THD,
                cache.k_pages,
                cache.v_pages,
                *shared,
                *strides,
                *cache.scale_strides,
                step.block_tables_RX.stride(0),
                sinks_H,
                slopes_H,
                **constants,
                **({} if cache.is_4bit else padding),
                CHUNK=chunk_size or 0,
                BLOCK_M=config.block_m,
                BLOCK_Q=config.block_q,
                KEYS=config.keys,
                STAGES=config.stages,
                INPUTS_READY=inputs_ready,
                num_warps=config.warps,
                **pdl_options(q_THD, rows),
            )
    if config.split == 1:
        return out_THD
    return merge_splits(partials, sums, step.query_starts_R1, out_THD, limbs)


def has_options(*options: torch.Tensor | int | None) -> bool:
    """Return True if any option is given.

    sm90_decode_8bit.py supports no sinks, slopes or chunks.
    """
    return any(option is not None for option in options)


def gluon_refuses(q_THD: torch.Tensor, cache: PagedKv) -> str | None:
    """Return why sm90_decode_8bit.py cannot run; None: it can."""
    D = q_THD.shape[2]
    if cache.k_scales is None:
        return "takes 8-bit and 4-bit KV"
    if q_THD.dtype != torch.bfloat16:
        return f"takes bfloat16 queries, not {q_THD.dtype}"
    if D not in (64, 128):
        return f"takes heads of 64 or 128, not {D}"
    for pages in (cache.k_pages, cache.v_pages):
        if pages.data_ptr() % 16 or any(stride % 16 for stride in pages.stride()[:3]):
            return "takes pages whose rows start at multiples of 16 bytes"
    for pairs in (cache.k_scales, cache.v_scales) if cache.is_4bit else ():
        count = pairs.shape[3]  # the kernel loads them as one integer
        if pairs.data_ptr() % (2 * count) or any(s % count for s in pairs.stride()[:3]):
            return f"takes scales and zeros of a slot that start at multiples of {2 * count} bytes"
    return gpu_device.lacks_arch(q_THD.device, "sm_90")


def alignment(*strides: int) -> int:
    """Return how many elements one load may take: 16 if all strides allow it, else 8 or 1."""
    return next(n for n in (16, 8, 1) if all(stride % n == 0 for stride in strides))


@triton.jit(do_not_specialize=["R", "T", "blocks_each"])
def _paged_attention(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, B, J, D]
    v_ptr,  # [P, B, J, D]
    tables_ptr,  # [R, X]
    starts_ptr,  # [R + 1]
    lengths_ptr,  # [R]
    bounds_ptr,  # [2], as AttentionStep.bounds_2
    k_scales_ptr,  # [P, B, J] of 8-bit pages, else None
    v_scales_ptr,  # [P, B, J]
    out_ptr,  # [T, H, D], written if SPLIT is 1
    partials_ptr,  # [T, H, S, D], written otherwise: each split's weighted sum of values
    sums_ptr,  # [2, T, H, S]: each split's largest score, and its sum of weights
    R,
    T,
    blocks_each,  # as rows_of takes it
    scale,  # makes scores base-2 logarithms, for exp2; with a soft cap, in units of the cap
    cap_log2,  # soft cap as a base-2 logarithm
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
    PADDED_D: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    INPUTS_READY: tl.constexpr,  # starts and lengths may be read before the previous kernel ends
    PDL: tl.constexpr,
):
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
    d = tl.arange(0, PADDED_D)
    row = first_row + m // PADDED_GROUP
    head = kv_head * GROUP + m % PADDED_GROUP
    real = (row < count) & (m % PADDED_GROUP < GROUP)
    token = (start + row).to(tl.int64)
    q_ptrs = q_ptr + token * stride_qt + head * stride_qh
    q = tl.load(q_ptrs[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)

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
    values = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
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
    if k_scales_ptr is not None:
        k_scales_head = k_scales_ptr + kv_head * stride_ksj
        v_scales_head = v_scales_ptr + kv_head * stride_vsj
    if BLOCK_M >= 64 and WINDOW == 0 and CHUNK == 0 and SPLIT == 1:
        # a chunk's first row sees all keys of these steps, so every row does
        whole_steps = (before + first_row + 1) // KEYS
        for step in tl.range(0, whole_steps, num_stages=STAGES):
            if B >= KEYS:
                page = tl.load(table + step * KEYS // B).to(tl.int64)
                offset = step * KEYS % B + tl.arange(0, KEYS)
                k_rows = page * stride_kp + offset * stride_kb
                v_rows = page * stride_vp + offset * stride_vb
            else:
                # one load per page instead of per key: 409 instructions per step instead of 480
                pages = step * (KEYS // B) + tl.arange(0, KEYS // B)
                page = tl.load(table + pages).to(tl.int64)[:, None]
                offset = tl.arange(0, B)[None, :]
                k_rows = (page * stride_kp + offset * stride_kb).reshape(KEYS)
                v_rows = (page * stride_vp + offset * stride_vb).reshape(KEYS)
            if ALIGNMENT > 1:  # the reshape loses this information
                k_rows = tl.multiple_of(k_rows, ALIGNMENT)
                v_rows = tl.multiple_of(v_rows, ALIGNMENT)
            k_scale = None
            v_scale = None
            if k_scales_ptr is not None:
                if B >= KEYS:
                    k_scale_rows = page * stride_ksp + offset * stride_ksb
                    v_scale_rows = page * stride_vsp + offset * stride_vsb
                else:
                    k_scale_rows = (page * stride_ksp + offset * stride_ksb).reshape(KEYS)
                    v_scale_rows = (page * stride_vsp + offset * stride_vsb).reshape(KEYS)
                k_scale = tl.load(k_scales_head + k_scale_rows)
                v_scale = tl.load(v_scales_head + v_scale_rows)
            if D == PADDED_D:
                k = tl.load(k_head + k_rows[None, :] + d[:, None])
                v = tl.load(v_head + v_rows[:, None] + d[None, :])
            else:
                k = tl.load(k_head + k_rows[None, :] + d[:, None], mask=d[:, None] < D, other=0.0)
                v = tl.load(v_head + v_rows[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
            if k_scales_ptr is None and not SOFT_CAP and slope is None:
                score = tl.dot(q, k, input_precision="ieee")
                new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
                weight = tl.exp2(score * scale - new_largest[:, None])
            else:
                score = scores_of(q, k, k_scale, scale, cap_log2, SOFT_CAP)
                if slope is not None:
                    score = _add_alibi(score, slope, step * KEYS + tl.arange(0, KEYS), position)
                new_largest = tl.maximum(largest, tl.max(score, 1))
                weight = tl.exp2(score - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            weights = weights * shrink + tl.sum(weight, 1)
            values = add_values(weight, v, v_scale, values * shrink[:, None], q.dtype)
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
        k_scale = None
        v_scale = None
        if k_scales_ptr is not None:
            k_scale_rows = page * stride_ksp + (key % B) * stride_ksb
            v_scale_rows = page * stride_vsp + (key % B) * stride_vsb
            k_scale = tl.load(k_scales_head + k_scale_rows, mask=exists, other=0.0)
            v_scale = tl.load(v_scales_head + v_scale_rows, mask=exists, other=0.0)
        score = scores_of(q, k, k_scale, scale, cap_log2, SOFT_CAP)
        if slope is not None:
            score = _add_alibi(score, slope, key, position)
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
        v = tl.load(
            v_head + v_rows[:, None] + d[None, :],
            mask=exists[:, None] & (d[None, :] < D),
            other=0.0,
        )
        values = add_values(weight, v, v_scale, values * shrink[:, None], q.dtype)
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
        split_row = out_row * SPLIT + split
        tl.store(
            partials_ptr + split_row[:, None] * D + d[None, :],
            values,
            mask=(real & (weights > 0))[:, None] & (d[None, :] < D),
        )
        tl.store(sums_ptr + split_row, largest, mask=real)
        tl.store(sums_ptr + T.to(tl.int64) * H * SPLIT + split_row, weights, mask=real)


@triton.jit
def scores_of(q, k, k_scale, scale, cap_log2, SOFT_CAP: tl.constexpr):
    """Return float32 scores as base-2 logarithms.

    k_scale: scale of each key with 8-bit KV, or None.
    """
    score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if k_scale is None:
        score *= scale
    else:
        score *= (k_scale * scale)[None, :]
    if SOFT_CAP:  # cap * tanh(score), where exp2 may be 0 or infinite
        score = cap_log2 - 2 * cap_log2 / (1 + tl.exp2(score * 2.8853900817779268))  # 2 log2(e)
    return score


@triton.jit
def _add_alibi(score, slope, key, position):
    """Add slope times (key - position), which is 0 or less, to the scores."""
    return score + slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)


@triton.jit
def add_values(weight, v, v_scale, values, DTYPE: tl.constexpr):
    """Add weight times v to `values`. v_scale: scale of each key with 8-bit KV, or None."""
    if v_scale is not None:
        if DTYPE.is_fp16():  # scale times weight may be too small for float16
            v = v.to(tl.float32) * v_scale[:, None]
        else:
            weight *= v_scale[None, :]
    return tl.dot(weight.to(DTYPE), v.to(DTYPE), values, input_precision="ieee")
