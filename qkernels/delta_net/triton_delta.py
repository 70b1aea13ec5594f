"""Gated delta rule in Triton: few rows of a request one after the other, prompts in chunks.

For few rows, a program reads and writes some columns of a head's state once. Without `recent_PNI`,
few means one row. With it, few means up to the rows of a verification, and rows that the state
lacks are applied first, for prompts before their chunks (triton_chunks.py) read the state. Legend:
see ops.py; BK keys and BV columns of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.delta_net.config import chunk_config, step_config
from qkernels.delta_net.reference import L2_EPS
from qkernels.delta_net.triton_chunks import run_chunks_
from qkernels.delta_net.triton_gates import decay_log, write_strength
from qkernels.gpu.config import ceil_div
from qkernels.gpu.device import arch
from qkernels.gpu.launch import launch, on_device


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
    write_factor: float = 1.0,
    decay_bound: float = 0.0,
) -> torch.Tensor:
    """Implement ops.delta_rule_."""
    if a_TH.shape[1] != b_TH.shape[1]:  # each key channel has its own decay
        from qkernels.delta_net import triton_recurrence

        return triton_recurrence.delta_rule_(
            *(mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, memory_PHKV),
            *(step, recent_PNI, write_factor, decay_bound),
        )
    mixed_TC, b_TH, a_TH = (
        x if x.stride(1) == 1 else x.contiguous() for x in (mixed_TC, b_TH, a_TH)
    )
    T, C = mixed_TC.shape
    _, H, K, V = memory_PHKV.shape
    R = step.slots_R.shape[0]
    o_THV = torch.empty((T, H, V), dtype=mixed_TC.dtype, device=mixed_TC.device)
    rule = mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, memory_PHKV, o_THV
    newest_rows = 0 if recent_PNI is None else recent_PNI.shape[1]
    few = max(1, newest_rows // 2)
    config = step_config(K, V)

    def run_separate_rows_() -> None:
        launch(
            _delta_rows,
            (R, H, ceil_div(V, config.columns)),
            *rule,
            memory_PHKV if recent_PNI is None else recent_PNI,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            step.slots_R if step.lacking_R is None else step.lacking_R,
            mixed_TC.stride(0),
            b_TH.stride(0),
            a_TH.stride(0),
            J=(C - H * V) // (2 * K),
            H=H,
            K=K,
            V=V,
            N=newest_rows,
            SCALE=K**-0.5,
            EPS=L2_EPS,
            BK=config.keys,
            BV=config.columns,
            WRITE_FACTOR=write_factor,
            num_warps=config.warps,
        )

    with on_device(mixed_TC):
        # run in any case: max_query_len is an upper bound, and all requests may be short
        run_separate_rows_()
        if step.max_query_len > few:
            chunks = chunk_config(K, V, mixed_TC.dtype, arch(mixed_TC.device))
            run_chunks_(*rule, step, chunks, few, write_factor)
    return o_THV


@triton.jit
def updated(
    state,
    key,
    value,
    b,
    a,
    a_log,
    dt_bias,
    EPS: tl.constexpr,
    CHANNELS: tl.constexpr = False,
    WRITE_FACTOR: tl.constexpr = 1.0,
    DECAY_BOUND: tl.constexpr = 0.0,
):
    """Return the state's columns after a token.

    CHANNELS: `a` and `dt_bias` have one number per key channel.
    """
    key = key * tl.rsqrt(tl.sum(key * key, 0) + EPS)
    left = tl.exp(decay_log(a, a_log, dt_bias, DECAY_BOUND))
    if CHANNELS:
        state *= left[:, None]
    else:
        state *= left
    written = write_strength(b, WRITE_FACTOR) * (value - tl.sum(key[:, None] * state, 0))
    return state + key[:, None] * written[None, :]


@triton.jit
def _delta_rows(
    mixed_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    memory_ptr,
    o_ptr,
    recent_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    lacking_ptr,
    stride_mixed,
    stride_b,
    stride_a,
    J: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WRITE_FACTOR: tl.constexpr,
):
    r, h = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts_ptr + r)
    count = tl.load(starts_ptr + r + 1) - first
    slot = tl.load(slots_ptr + r)
    lacking = 0
    if N > 0:
        lacking = tl.load(lacking_ptr + r)
    MOST: tl.constexpr = N // 2 if N > 1 else 1
    is_few = (count > 0) & (count <= MOST)
    if is_few | (lacking > 0):
        position = tl.load(lengths_ptr + r) - count  # position of the first row
        goes_on = (slot >= 0) & (position > 0)
        # number of the state's key rows to read and to write: K or 0
        keys_read, keys_kept = tl.where(goes_on, K, 0), tl.where(slot >= 0, K, 0)
        k = tl.arange(0, BK)
        v = tl.program_id(2) * BV + tl.arange(0, BV)
        in_k, in_v = k < K, v < V
        place = (slot.to(tl.int64) * H + h) * K * V
        state_ptrs = memory_ptr + place + k[:, None] * V + v[None, :]
        state_mask = (k < keys_kept)[:, None] & in_v[None, :]
        were_there = (k < keys_read)[:, None] & in_v[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
        key_head = h // (H // J) * K
        INPUTS: tl.constexpr = J * K + H * V + 2 * H
        # Rows of `recent` are keys, values, b and a.
        if N > 0:
            recent_ptr += slot.to(tl.int64) * N * INPUTS
            for i in range(0, lacking):
                inputs_ptr = recent_ptr + (position - lacking + i) % N * INPUTS
                key = tl.load(inputs_ptr + key_head + k, mask=in_k, other=0.0).to(tl.float32)
                value_ptrs = inputs_ptr + J * K + h * V + v
                value = tl.load(value_ptrs, mask=in_v, other=0.0).to(tl.float32)
                b = tl.load(inputs_ptr + J * K + H * V + h).to(tl.float32)
                a = tl.load(inputs_ptr + J * K + H * V + H + h).to(tl.float32)
                inputs = key, value, b, a
                state = updated(state, *inputs, a_log, dt_bias, EPS, False, WRITE_FACTOR)
            if count > 1:
                tl.store(state_ptrs, state, mask=state_mask)
        # several programs have the same keys and gates; the first program stores them
        keeps = (count > 1) & (slot >= 0)
        keeps_gates = keeps & (tl.program_id(2) == 0)
        keys_new = tl.where(keeps_gates & (h % (H // J) == 0), K, 0)
        values_new, gates_new = tl.where(keeps, V, 0), tl.where(keeps_gates, 2, 0)
        gate = tl.arange(0, 2)  # b and a
        for i in range(0, tl.where(is_few, count, 0)):
            row = (first + i).to(tl.int64)
            row_ptr = mixed_ptr + row * stride_mixed
            query = tl.load(row_ptr + key_head + k, mask=in_k, other=0.0).to(tl.float32)
            key = tl.load(row_ptr + J * K + key_head + k, mask=in_k, other=0.0)
            value = tl.load(row_ptr + 2 * J * K + h * V + v, mask=in_v, other=0.0)
            a = tl.load(a_ptr + row * stride_a + h)
            b = tl.load(b_ptr + row * stride_b + h)
            if N > 0:
                inputs_ptr = recent_ptr + (position + i) % N * INPUTS
                tl.store(inputs_ptr + key_head + k, key, mask=k < keys_new)
                tl.store(inputs_ptr + J * K + h * V + v, value, mask=v < values_new)
                gate_ptrs = inputs_ptr + J * K + H * V + gate * H + h
                gates = tl.where(gate == 0, b, a)
                tl.store(gate_ptrs, gates, mask=gate < gates_new)
            query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * SCALE
            key, value = key.to(tl.float32), value.to(tl.float32)
            b, a = b.to(tl.float32), a.to(tl.float32)
            inputs = key, value, b, a
            state = updated(state, *inputs, a_log, dt_bias, EPS, False, WRITE_FACTOR)
            out = tl.sum(query[:, None] * state, 0)
            tl.store(o_ptr + (row * H + h) * V + v, out.to(o_ptr.dtype.element_ty), mask=in_v)
        if count == 1:
            tl.store(state_ptrs, state, mask=state_mask)
