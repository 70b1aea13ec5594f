"""The gated delta rule in Triton as a recurrence over all rows of a request.

One compiled kernel for decodes and prompts: the state stays in registers from a request's first row
to its last, and each row computes what a decode of it alone would. A program is one warp and takes
a few columns of a head's state, so that sums over keys need no other warp. Legend as in ops.py; BK
keys and BV columns of a tile.
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
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.delta_rule_."""
    mixed_TC, b_TH, a_TH = (
        x if x.stride(1) == 1 else x.contiguous() for x in (mixed_TC, b_TH, a_TH)
    )
    T, C = mixed_TC.shape
    _, H, K, V = memory_PHKV.shape
    o_THV = torch.empty((T, H, V), dtype=mixed_TC.dtype, device=mixed_TC.device)
    config = recurrence_config(K, V)
    with on_device(mixed_TC):
        launch(
            _delta_rows,
            (ceil_div(V, config.columns), H, step.slots_R.shape[0]),
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
            J=(C - H * V) // (2 * K),
            H=H,
            K=K,
            V=V,
            SCALE=K**-0.5,
            EPS=L2_EPS,
            BK=config.keys,
            BV=config.columns,
            num_warps=config.warps,
        )
    return o_THV


@triton.jit
def _load_row(query_ptrs, value_ptrs, a_ptr, b_ptr, in_k, in_v, J: tl.constexpr, K: tl.constexpr):
    """query, key [BK], value [BV], a and b of one row and head."""
    query = tl.load(query_ptrs, mask=in_k, other=0.0)
    key = tl.load(query_ptrs + J * K, mask=in_k, other=0.0)
    value = tl.load(value_ptrs, mask=in_v, other=0.0)
    return query, key, value, tl.load(a_ptr), tl.load(b_ptr)


@triton.jit
def _delta_rows(
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
    h, r = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + r).to(tl.int64)
    count = (tl.load(starts_ptr + r + 1) - first).to(tl.int32)
    if count > 0:
        slot = tl.load(slots_ptr + r)
        goes_on = (slot >= 0) & (tl.load(lengths_ptr + r) > count)
        # Keys of the state that are read and written: all or none.
        keys_read, keys_kept = tl.where(goes_on, K, 0), tl.where(slot >= 0, K, 0)
        k = tl.arange(0, BK)
        v = tl.program_id(0) * BV + tl.arange(0, BV)
        in_k, in_v = k < K, v < V
        place = (slot.to(tl.int64) * H + h) * K * V
        state_ptrs = memory_ptr + place + k[:, None] * V + v[None, :]
        were_there = (k < keys_read)[:, None] & in_v[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
        mixed_ptr += first * stride_mixed
        query_ptrs = mixed_ptr + h // (H // J) * K + k
        value_ptrs = mixed_ptr + 2 * J * K + h * V + v
        a_ptr += first * stride_a + h
        b_ptr += first * stride_b + h
        o_ptrs = o_ptr + (first * H + h) * V + v
        query, key, value, a, b = _load_row(query_ptrs, value_ptrs, a_ptr, b_ptr, in_k, in_v, J, K)
        for t in tl.range(0, count):
            # The next row's loads depend on no sum; the last row loads itself again.
            after = tl.minimum(t + 1, count - 1).to(tl.int64)
            moved = after * stride_mixed
            next_query, next_key, next_value, next_a, next_b = _load_row(
                query_ptrs + moved,
                value_ptrs + moved,
                a_ptr + after * stride_a,
                b_ptr + after * stride_b,
                in_k,
                in_v,
                J,
                K,
            )
            q, p = query.to(tl.float32), key.to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
            wide_value, wide_b, wide_a = value.to(tl.float32), b.to(tl.float32), a.to(tl.float32)
            state = updated(state, p, wide_value, wide_b, wide_a, a_log, dt_bias, EPS)
            out = tl.sum(q[:, None] * state, 0)
            tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=in_v)
            o_ptrs += H * V
            query, key, value, a, b = next_query, next_key, next_value, next_a, next_b
        tl.store(state_ptrs, state, mask=(k < keys_kept)[:, None] & in_v[None, :])
