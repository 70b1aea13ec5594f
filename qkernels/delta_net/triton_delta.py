"""The gated delta rule in Triton: rows that are their request's only one here, others by chunks.

Of one row, a program reads and writes some columns of a head's state once. Prompts are in
triton_chunks.py. Legend as in ops.py; BK keys and BV columns of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.delta_net.config import chunk_config, step_config
from qkernels.delta_net.reference import L2_EPS
from qkernels.delta_net.triton_chunks import run_chunks_
from qkernels.delta_net.triton_gates import decay_log, write_share
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
) -> torch.Tensor:
    """Implement ops.delta_rule_."""
    mixed_TC, b_TH, a_TH = (
        x if x.stride(1) == 1 else x.contiguous() for x in (mixed_TC, b_TH, a_TH)
    )
    T, C = mixed_TC.shape
    _, H, K, V = memory_PHKV.shape
    R = step.slots_R.shape[0]
    o_THV = torch.empty((T, H, V), dtype=mixed_TC.dtype, device=mixed_TC.device)
    rule = mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, memory_PHKV, o_THV
    with on_device(mixed_TC):
        if step.max_query_len > 1:
            config = chunk_config(K, V, mixed_TC.dtype, arch(mixed_TC.device))
            run_chunks_(*rule, step, config)
        # Also after chunks: the longest request may be shorter than the host knows.
        config = step_config(K, V)
        launch(
            _delta_step,
            (R, H, ceil_div(V, config.columns)),
            *rule,
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
    if tl.load(starts_ptr + r + 1) == row + 1:
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
        beta = write_share(tl.load(b_ptr + row * stride_b + h).to(tl.float32))
        state *= tl.exp(decay_log(a, tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)))
        written = beta * (value - tl.sum(key[:, None] * state, 0))
        state += key[:, None] * written[None, :]
        out = tl.sum(query[:, None] * state, 0)
        tl.store(o_ptr + (row * H + h) * V + v, out.to(o_ptr.dtype.element_ty), mask=in_v)
        tl.store(state_ptrs, state, mask=(k < keys_kept)[:, None] & in_v[None, :])
