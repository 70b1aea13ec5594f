"""Gated delta rule in Triton as a recurrence over all rows of a request.

One compiled kernel runs decodes, prompts and verifications, with and without speculation. The state
stays in registers from a request's first row to its last, and each row computes exactly what its
own decode step would. Rows that the state lacks (StateStep) come first, in the same loop. A program
is one warp with a few columns of a head's state, so that sums over keys stay within the warp.
Legend: see ops.py; BK keys and BV columns of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.delta_net.config import recurrence_config
from qkernels.delta_net.reference import L2_EPS
from qkernels.delta_net.triton_delta import updated
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TA: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_A: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
    write_factor: float = 1.0,
    decay_bound: float = 0.0,
) -> torch.Tensor:
    """Implement ops.delta_rule_."""
    mixed_TC, b_TH, a_TA = (
        x if x.stride(1) == 1 else x.contiguous() for x in (mixed_TC, b_TH, a_TA)
    )
    T, C = mixed_TC.shape
    _, H, K, V = memory_PHKV.shape
    o_THV = torch.empty((T, H, V), dtype=mixed_TC.dtype, device=mixed_TC.device)
    config = recurrence_config(K, V)
    # without speculation, the same kernel runs with no lacking and no kept rows
    newest_rows = 0 if recent_PNI is None else recent_PNI.shape[1]
    with on_device(mixed_TC):
        launch(
            _delta_rows,
            (ceil_div(V, config.columns), H, step.slots_R.shape[0]),
            mixed_TC,
            b_TH,
            a_TA,
            a_log_H,
            dt_bias_A,
            memory_PHKV,
            o_THV,
            mixed_TC if recent_PNI is None else recent_PNI,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            step.slots_R if step.lacking_R is None else step.lacking_R,
            newest_rows,
            mixed_TC.stride(0),
            b_TH.stride(0),
            a_TA.stride(0),
            J=(C - H * V) // (2 * K),
            H=H,
            K=K,
            V=V,
            SCALE=K**-0.5,
            EPS=L2_EPS,
            BK=config.keys,
            BV=config.columns,
            CHANNELS=a_TA.shape[1] != H,
            WRITE_FACTOR=write_factor,
            DECAY_BOUND=decay_bound,
            num_warps=config.warps,
        )
    return o_THV


@triton.jit
def _load_row(
    t,  # negative: a row that the state lacks
    mixed_ptrs,  # queries, and keys with values, of the first row
    b_ptr,
    a_ptr,
    inputs_ptr,
    key,
    value_at,
    in_k,
    in_v,
    stride_mixed,
    stride_b,
    stride_a,
    b_at,
    a_at,
    CHANNELS: tl.constexpr,
):
    """Load query and key [BK], value [BV], b and a of one row and head.

    The query of a lacking row is not used. CHANNELS: `a` [BK] has one number per key channel.
    """
    row, is_old = tl.cast(tl.maximum(t, 0), tl.int64), t < 0
    query_ptr, key_ptr = mixed_ptrs
    query = tl.load(query_ptr + row * stride_mixed + key, mask=in_k, other=0.0)
    base_ptr = tl.where(is_old, inputs_ptr, key_ptr + row * stride_mixed)
    k = tl.load(base_ptr + key, mask=in_k, other=0.0)
    v = tl.load(base_ptr + value_at, mask=in_v, other=0.0)
    b = tl.load(tl.where(is_old, inputs_ptr + b_at, b_ptr + row * stride_b))
    a_ptrs = tl.where(is_old, inputs_ptr + a_at, a_ptr + row * stride_a)
    a = tl.load(a_ptrs, mask=in_k, other=0.0) if CHANNELS else tl.load(a_ptrs)
    return query, k, v, b, a


@triton.jit(do_not_specialize=["newest_rows"])
def _delta_rows(
    mixed_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    memory_ptr,
    o_ptr,
    recent_ptr,  # [P, newest_rows, INPUTS]: keys, values, b and a
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    lacking_ptr,
    newest_rows,  # 0: no row is ever rejected
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
    CHANNELS: tl.constexpr,
    WRITE_FACTOR: tl.constexpr,
    DECAY_BOUND: tl.constexpr,
):
    h, r = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + r).to(tl.int64)
    count = (tl.load(starts_ptr + r + 1) - first).to(tl.int32)
    if count > 0:
        slot = tl.load(slots_ptr + r)
        position = tl.load(lengths_ptr + r) - count  # position of the first row
        goes_on = (slot >= 0) & (position > 0)
        lacking = tl.where(newest_rows > 0, tl.load(lacking_ptr + r), 0)
        # the stored state does not include the rows of a verification; their inputs are kept
        is_verify = (count > 1) & (count <= newest_rows // 2)
        # number of the state's key rows to read and to write: K or 0
        keys_read, keys_kept = tl.where(goes_on, K, 0), tl.where(slot >= 0, K, 0)
        k = tl.arange(0, BK)
        v = tl.program_id(0) * BV + tl.arange(0, BV)
        in_k, in_v = k < K, v < V
        place = (slot.to(tl.int64) * H + h) * K * V
        state_ptrs = memory_ptr + place + k[:, None] * V + v[None, :]
        state_mask = (k < keys_kept)[:, None] & in_v[None, :]
        were_there = (k < keys_read)[:, None] & in_v[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        a_log = tl.load(a_log_ptr + h)
        if CHANNELS:
            a_ptrs = a_ptr + first * stride_a + h * K + k
            dt_bias = tl.load(dt_bias_ptr + h * K + k, mask=in_k, other=0.0)
        else:
            a_ptrs = a_ptr + first * stride_a + h
            dt_bias = tl.load(dt_bias_ptr + h)
        # indices in a row of keys, followed by values
        key_at, value_at = h // (H // J) * K + k, J * K + h * V + v
        mixed_ptr += first * stride_mixed
        b_ptr += first * stride_b + h
        o_ptr += (first * H + h) * V
        INPUTS: tl.constexpr = J * K + H * V + H + (H * K if CHANNELS else H)
        GATES: tl.constexpr = J * K + H * V
        ring = tl.maximum(newest_rows, 1)
        recent_ptr += slot.to(tl.int64) * newest_rows * INPUTS
        # several programs have the same keys and gates; the first program stores them
        keeps = is_verify & (slot >= 0)
        keeps_gates = keeps & (tl.program_id(0) == 0)
        keys_new = tl.where(keeps_gates & (h % (H // J) == 0), K, 0)
        values_new, gates_new = tl.where(keeps, V, 0), tl.where(keeps_gates, 2, 0)
        gate = tl.arange(0, 2)  # b and a
        b_at = GATES + h  # index in a row of `recent`
        a_at = GATES + H + (h * K + k if CHANNELS else h)
        decays_new = tl.where(keeps_gates, K, 0)
        mixed_ptrs = mixed_ptr, mixed_ptr + J * K
        at = (position - lacking) % ring
        inputs_ptr = recent_ptr + at * INPUTS
        query, key, value, b, a = _load_row(
            -lacking,
            mixed_ptrs,
            b_ptr,
            a_ptrs,
            inputs_ptr,
            key_at,
            value_at,
            in_k,
            in_v,
            stride_mixed,
            stride_b,
            stride_a,
            b_at,
            a_at,
            CHANNELS,
        )
        for t in tl.range(-lacking, count):
            # load the next row before the sums of this one; after the last row, load it again
            after = tl.minimum(t + 1, count - 1)
            at = tl.where(at + 1 < ring, at + 1, 0)
            next_inputs_ptr = recent_ptr + at * INPUTS
            next_query, next_key, next_value, next_b, next_a = _load_row(
                after,
                mixed_ptrs,
                b_ptr,
                a_ptrs,
                next_inputs_ptr,
                key_at,
                value_at,
                in_k,
                in_v,
                stride_mixed,
                stride_b,
                stride_a,
                b_at,
                a_at,
                CHANNELS,
            )
            if is_verify & (t >= 0):
                if t == 0:
                    tl.store(state_ptrs, state, mask=state_mask)
                tl.store(inputs_ptr + key_at, key, mask=k < keys_new)
                tl.store(inputs_ptr + value_at, value, mask=v < values_new)
                if CHANNELS:
                    tl.store(inputs_ptr + b_at, b, mask=gates_new > 0)
                    tl.store(inputs_ptr + a_at, a, mask=k < decays_new)
                else:
                    gates = tl.where(gate == 0, b, a)
                    tl.store(inputs_ptr + GATES + gate * H + h, gates, mask=gate < gates_new)
            q, p = query.to(tl.float32), key.to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
            wide_value, wide_b, wide_a = value.to(tl.float32), b.to(tl.float32), a.to(tl.float32)
            wide = p, wide_value, wide_b, wide_a
            state = updated(state, *wide, a_log, dt_bias, EPS, CHANNELS, WRITE_FACTOR, DECAY_BOUND)
            out = tl.sum(q[:, None] * state, 0)
            o_ptrs = o_ptr + tl.cast(t, tl.int64) * (H * V) + v
            tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=v < tl.where(t >= 0, V, 0))
            query, key, value, b, a = next_query, next_key, next_value, next_b, next_a
            inputs_ptr = next_inputs_ptr
        kept = tl.where(is_verify, 0, keys_kept)
        tl.store(state_ptrs, state, mask=(k < kept)[:, None] & in_v[None, :])
