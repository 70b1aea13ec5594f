"""The gated delta rule in Triton: a token of each request, or chunks of prompts.

A program has some columns of a head's state in registers, and takes all rows of its request: of one
row each it reads and writes the state once, of more it goes from chunk to chunk. Within a chunk the
recurrence is a triangular system (chunked.py), which is solved row by row. Legend as in ops.py; BK
keys, BV columns and BT rows of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.delta_net.config import delta_config
from qkernels.delta_net.reference import L2_EPS
from qkernels.delta_net.state import StateStep
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """As ops.delta_rule_."""
    mixed_TC, b_TH, a_TH = (
        x if x.stride(1) == 1 else x.contiguous() for x in (mixed_TC, b_TH, a_TH)
    )
    T, C = mixed_TC.shape
    _, H, K, V = memory_PHKV.shape
    J = (C - H * V) // (2 * K)
    o_THV = torch.empty((T, H, V), dtype=mixed_TC.dtype, device=mixed_TC.device)
    config = delta_config(step.max_query_len, K, V, mixed_TC.dtype)
    tile = {} if config.rows == 1 else {"BT": config.rows, "PRECISION": config.precision}
    with on_device(mixed_TC):
        launch(
            _delta_step if config.rows == 1 else _delta_chunks,
            (step.slots_R.shape[0], H, ceil_div(V, config.columns)),
            mixed_TC,
            b_TH,
            a_TH,
            a_log_H,
            dt_bias_H,
            memory_PHKV,
            o_THV,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            mixed_TC.stride(0),
            b_TH.stride(0),
            a_TH.stride(0),
            J=J,
            H=H,
            K=K,
            V=V,
            SCALE=K**-0.5,
            EPS=L2_EPS,
            BK=config.keys,
            BV=config.columns,
            **tile,
            num_warps=config.warps,
        )
    return o_THV


@triton.jit
def _decay_log(a, a_log, dt_bias):
    """-exp(a_log) softplus(a + dt_bias)."""
    x = a + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _delta_step(
    mixed_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    memory_ptr,
    o_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    stride_mixed,
    stride_b,
    stride_a,
    J: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    r, h = tl.program_id(0), tl.program_id(1)
    row = tl.load(starts_ptr + r).to(tl.int64)
    if tl.load(starts_ptr + r + 1) > row:
        slot = tl.load(slots_ptr + r)
        goes_on = (slot >= 0) & (tl.load(lengths_ptr + r) > 1)
        # Keys of the state that are read and written: all or none.
        keys_read, keys_kept = tl.where(goes_on, K, 0), tl.where(slot >= 0, K, 0)
        k = tl.arange(0, BK)
        v = tl.program_id(2) * BV + tl.arange(0, BV)
        in_k, in_v = k < K, v < V
        place = (slot.to(tl.int64) * H + h) * K * V
        state_ptrs = memory_ptr + place + k[:, None] * V + v[None, :]
        were_there = (k < keys_read)[:, None] & in_v[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        row_ptr = mixed_ptr + row * stride_mixed
        key_head = h // (H // J) * K
        query = tl.load(row_ptr + key_head + k, mask=in_k, other=0.0).to(tl.float32)
        key = tl.load(row_ptr + J * K + key_head + k, mask=in_k, other=0.0).to(tl.float32)
        value = tl.load(row_ptr + 2 * J * K + h * V + v, mask=in_v, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * SCALE
        key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
        a = tl.load(a_ptr + row * stride_a + h).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + row * stride_b + h).to(tl.float32)))
        state *= tl.exp(_decay_log(a, tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)))
        written = beta * (value - tl.sum(key[:, None] * state, 0))
        state += key[:, None] * written[None, :]
        out = tl.sum(query[:, None] * state, 0)
        tl.store(o_ptr + (row * H + h) * V + v, out.to(o_ptr.dtype.element_ty), mask=in_v)
        tl.store(state_ptrs, state, mask=(k < keys_kept)[:, None] & in_v[None, :])


@triton.jit
def _delta_chunks(
    mixed_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    memory_ptr,
    o_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    stride_mixed,
    stride_b,
    stride_a,
    J: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    r, h = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + r).to(tl.int64)
    count = (tl.load(starts_ptr + r + 1) - start).to(tl.int32)
    if count > 0:
        slot = tl.load(slots_ptr + r)
        goes_on = (slot >= 0) & (tl.load(lengths_ptr + r) > count)
        # Keys of the state that are read and written: all or none.
        keys_read, keys_kept = tl.where(goes_on, K, 0), tl.where(slot >= 0, K, 0)
        k = tl.arange(0, BK)
        v = tl.program_id(2) * BV + tl.arange(0, BV)
        i = tl.arange(0, BT)
        in_v = v < V
        place = (slot.to(tl.int64) * H + h) * K * V
        state_ptrs = memory_ptr + place + k[:, None] * V + v[None, :]
        were_there = (k < keys_read)[:, None] & in_v[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
        key_head = h // (H // J) * K
        for first in range(0, count, BT):
            in_t = first + i < count
            row = start + first + i
            row_ptrs = mixed_ptr + row[:, None] * stride_mixed
            of_keys = in_t[:, None] & (k < K)[None, :]
            of_values = in_t[:, None] & in_v[None, :]
            query_ptrs = row_ptrs + key_head + k[None, :]
            key = tl.load(query_ptrs + J * K, mask=of_keys, other=0.0).to(tl.float32)
            value_ptrs = row_ptrs + 2 * J * K + h * V + v[None, :]
            value = tl.load(value_ptrs, mask=of_values, other=0.0).to(tl.float32)
            key *= tl.rsqrt(tl.sum(key * key, 1) + EPS)[:, None]
            a = tl.load(a_ptr + row * stride_a + h, mask=in_t, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + row * stride_b + h, mask=in_t, other=0.0).to(tl.float32)
            # Rows behind the end write nothing and forget nothing.
            beta = tl.where(in_t, 1.0 / (1.0 + tl.exp(-b)), 0.0)
            decay = tl.where(in_t, _decay_log(a, a_log, dt_bias), 0.0)
            total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
            causal = i[:, None] >= i[None, :]
            left = tl.where(causal, total[:, None] - total[None, :], 0.0)
            left = tl.where(causal, tl.exp(left), 0.0)
            before = tl.exp(total)[:, None]
            keys = tl.trans(key)
            overlap = tl.dot(key, keys, input_precision=PRECISION) * left * beta[:, None]
            known = tl.dot(key, state, input_precision=PRECISION) * before
            written = beta[:, None] * (value - known)
            # Row by row: what a row writes follows from what those before it wrote.
            for at in range(1, BT):
                of_row = tl.sum(tl.where((i == at)[:, None], overlap, 0.0), 0)
                of_row = tl.where(i < at, of_row, 0.0)
                found = tl.sum(of_row[:, None] * written, 0)
                written = tl.where((i == at)[:, None], written - found[None, :], written)
            # Only now: beside the keys, queries would not fit into registers.
            query = tl.load(query_ptrs, mask=of_keys, other=0.0).to(tl.float32)
            query *= (tl.rsqrt(tl.sum(query * query, 1) + EPS) * SCALE)[:, None]
            inner = tl.dot(query, keys, input_precision=PRECISION) * left
            out = tl.dot(query, state, input_precision=PRECISION) * before
            out = tl.dot(inner, written, out, input_precision=PRECISION)
            o_ptrs = o_ptr + (row * H + h)[:, None] * V + v[None, :]
            tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=of_values)
            key *= tl.exp(last - total)[:, None]
            state *= tl.exp(last)
            state = tl.dot(tl.trans(key), written, state, input_precision=PRECISION)
        tl.store(state_ptrs, state, mask=(k < keys_kept)[:, None] & in_v[None, :])
