"""Gated delta rule for prompts in Triton: solve all chunks' systems, then scan over chunks.

Within a chunk the recurrence is a triangular system (the UT transform of Yang et al., 2024). The
first kernel inverts it for every chunk of every request and head in parallel. The scan holds some
columns of a head's state in registers and processes its request's chunks in order, with products
only. triton_delta.py runs requests with few rows.

Operands of products have the workspace's dtype; sums are float32. Queries and keys are multiplied
unscaled, and the sums are scaled for keys of length 1, so no operand is rounded again. Arguments of
exp are never positive. All entries of the inverse and of its intermediate results are at most 2 in
size (each one is beta times a product of contractions 1 - beta k k^T between keys, and beta is at
most 2). So float16, which has as many mantissa bits as tf32, can hold them for 16-bit operands.

Legend: see ops.py; BK keys, BV columns and BT rows of a tile. `solve` [T, H, BT]: a chunk writes
solve (v - k S), where S is the state before it. `inner` [T, H, BT]: what its rows read of that.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.delta_net.config import ChunkConfig
from qkernels.delta_net.reference import L2_EPS
from qkernels.delta_net.triton_gates import decay_log, write_strength
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch
from qkernels.gpu.row_blocks import request_of


def run_chunks_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHKV: torch.Tensor,
    o_THV: torch.Tensor,
    step: StateStep,
    config: ChunkConfig,
    few: int,
    write_factor: float = 1.0,
) -> None:
    """Implement ops.delta_rule_ for requests with more than `few` rows.

    Writes their outputs to `o_THV` and their states to `memory_PHKV`.
    """
    T, C = mixed_TC.shape
    _, H, K, V = memory_PHKV.shape
    R = step.slots_R.shape[0]
    sizes = {"J": (C - H * V) // (2 * K), "H": H, "K": K, "V": V}
    operands = {"dtype": config.operands, "device": mixed_TC.device}
    solve_THB, inner_THB = torch.empty((2, T, H, config.rows), **operands)
    factors_4HT = torch.empty((4, H, T), dtype=torch.float32, device=mixed_TC.device)
    launch(
        _chunk_systems,
        # request r has the chunk numbers from starts[r] / rows + r on, which no other request has
        (T // config.rows + R, H),
        mixed_TC,
        b_TH,
        a_TH,
        a_log_H,
        dt_bias_H,
        solve_THB,
        inner_THB,
        factors_4HT,
        step.query_starts_R1,
        R,
        T,
        mixed_TC.stride(0),
        b_TH.stride(0),
        a_TH.stride(0),
        **sizes,
        FEW=few,
        SCALE=K**-0.5,
        EPS=L2_EPS,
        BK=config.keys,
        BT=config.rows,
        PRECISION=config.precision,
        WRITE_FACTOR=write_factor,
        num_warps=config.system_warps,
        maxnreg=config.system_registers,
    )
    launch(
        _chunk_scan,
        (ceil_div(V, config.columns), H, R),
        mixed_TC,
        solve_THB,
        inner_THB,
        factors_4HT,
        memory_PHKV,
        o_THV,
        step.query_starts_R1,
        step.context_lengths_R,
        step.slots_R,
        T,
        mixed_TC.stride(0),
        **sizes,
        FEW=few,
        BK=config.keys,
        BV=config.columns,
        BT=config.rows,
        PRECISION=config.precision,
        STAGES=config.stages,
        num_warps=config.scan_warps,
    )


@triton.jit
def _inverse(lower, BT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return (1 + lower)^-1 of a strictly lower triangular matrix [BT, BT].

    Each level makes the inverses of diagonal blocks of twice the size: the new block below the
    diagonal is -inv(right) lower inv(left).
    """
    i = tl.arange(0, BT)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    lower = lower.to(OPERAND)
    for level in tl.static_range(8):
        size = 2**level
        if size < BT:
            same = (i // (2 * size))[:, None] == (i // (2 * size))[None, :]
            below = same & ((i & size)[:, None] > (i & size)[None, :])
            of_level = tl.where(below, lower, 0.0)
            if size == 1:
                inverse -= of_level.to(tl.float32)
            else:
                known = inverse.to(OPERAND)
                found = tl.dot(of_level, known, input_precision=PRECISION)
                inverse = tl.dot(known, -found.to(OPERAND), inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["R", "T"])
def _chunk_systems(
    mixed_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    solve_ptr,
    inner_ptr,
    factors_ptr,
    starts_ptr,
    R,
    T,
    stride_mixed,
    stride_b,
    stride_a,
    J: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    FEW: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
    WRITE_FACTOR: tl.constexpr,
):
    OPERAND: tl.constexpr = solve_ptr.dtype.element_ty
    INVERSE: tl.constexpr = tl.float32 if tl.float32 == OPERAND else tl.float16
    chunk, h = tl.program_id(0), tl.program_id(1)
    r = request_of(starts_ptr, chunk, R, BT)
    start = tl.load(starts_ptr + r)
    count = tl.load(starts_ptr + r + 1) - start
    first = (chunk - (start // BT + r)) * BT
    if (count > FEW) & (first < count):
        i, k = tl.arange(0, BT), tl.arange(0, BK)
        in_t = i < count - first
        of_keys = in_t[:, None] & (k < K)[None, :]
        # from here on, pointers are at the chunk's first row of this head
        row = (start + first).to(tl.int64)
        mixed_ptr += row * stride_mixed
        query_ptrs = mixed_ptr + h // (H // J) * K + i[:, None] * stride_mixed + k[None, :]
        of_head = row * H + h
        factors_ptr += h.to(tl.int64) * T + row
        key = tl.load(query_ptrs + J * K, mask=of_keys, other=0.0)
        wide = key.to(tl.float32)
        key_norm = tl.rsqrt(tl.sum(wide * wide, 1) + EPS)
        key = key.to(OPERAND)
        a = tl.load(a_ptr + row * stride_a + h + i * stride_a, mask=in_t, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * stride_b + h + i * stride_b, mask=in_t, other=0.0).to(tl.float32)
        # rows after the end leave the state unchanged
        beta = tl.where(in_t, write_strength(b, WRITE_FACTOR), 0.0)
        decay = decay_log(a, tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h))
        decay = tl.where(in_t, decay, 0.0)
        total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        causal = i[:, None] >= i[None, :]
        left = tl.where(causal, total[:, None] - total[None, :], float("-inf"))
        left = tl.exp(left) * key_norm[None, :]

        query = tl.load(query_ptrs, mask=of_keys, other=0.0)
        wide = query.to(tl.float32)
        read = tl.rsqrt(tl.sum(wide * wide, 1) + EPS) * SCALE
        inner = tl.dot(query.to(OPERAND), tl.trans(key), input_precision=PRECISION)
        inner *= left * read[:, None]
        inner_ptrs = inner_ptr + of_head * BT + i[:, None] * (H * BT) + i[None, :]
        tl.store(inner_ptrs, inner.to(OPERAND), mask=in_t[:, None])
        per_factor = H * T.to(tl.int64)
        tl.store(factors_ptr + i, read * tl.exp(total), mask=in_t)
        factors_ptr += per_factor
        tl.store(factors_ptr + i, key_norm * tl.exp(total), mask=in_t)
        factors_ptr += per_factor
        tl.store(factors_ptr + i, key_norm * tl.exp(last - total), mask=in_t)
        tl.store(factors_ptr + per_factor, tl.exp(last))

        overlap = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        overlap *= left * (key_norm * beta)[:, None]
        solve = _inverse(overlap, BT, INVERSE, PRECISION) * beta[None, :]
        solve_ptrs = solve_ptr + of_head * BT + i[:, None] * (H * BT) + i[None, :]
        tl.store(solve_ptrs, solve.to(OPERAND), mask=in_t[:, None])


@triton.jit(do_not_specialize=["T"])
def _chunk_scan(
    mixed_ptr,
    solve_ptr,
    inner_ptr,
    factors_ptr,
    memory_ptr,
    o_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    T,
    stride_mixed,
    J: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    FEW: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    OPERAND: tl.constexpr = solve_ptr.dtype.element_ty
    h, r = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + r)
    count = tl.load(starts_ptr + r + 1) - start
    if count > FEW:
        slot = tl.load(slots_ptr + r)
        goes_on = (slot >= 0) & (tl.load(lengths_ptr + r) > count)
        # number of the state's key rows to read and to write: K or 0
        keys_read, keys_kept = tl.where(goes_on, K, 0), tl.where(slot >= 0, K, 0)
        i, k = tl.arange(0, BT), tl.arange(0, BK)
        v = tl.program_id(0) * BV + tl.arange(0, BV)
        in_k, in_v = (k < K)[None, :], (v < V)[None, :]
        place = (slot.to(tl.int64) * H + h) * K * V
        state_ptrs = memory_ptr + place + k[:, None] * V + v[None, :]
        state = tl.load(state_ptrs, mask=(k < keys_read)[:, None] & in_v, other=0.0)
        # from here on, pointers are at the request's first row of this head
        base = start.to(tl.int64)
        mixed_ptr += base * stride_mixed
        of_head = base * H + h
        o_ptr += of_head * V
        solve_ptr += of_head * BT
        inner_ptr += of_head * BT
        factors_ptr += h.to(tl.int64) * T + base
        per_factor = H * T.to(tl.int64)
        query_ptrs = mixed_ptr + h // (H // J) * K + i[:, None] * stride_mixed + k[None, :]
        value_ptrs = mixed_ptr + 2 * J * K + h * V + i[:, None] * stride_mixed + v[None, :]
        within = i[:, None] * (H * BT) + i[None, :]
        for first in tl.range(0, count, BT, num_stages=STAGES):
            t = tl.cast(first, tl.int64)
            inside = i < count - first
            in_t = inside[:, None]
            key_ptrs = query_ptrs + t * stride_mixed + J * K
            key = tl.load(key_ptrs, mask=in_t & in_k, other=0.0).to(OPERAND)
            query = tl.load(key_ptrs - J * K, mask=in_t & in_k, other=0.0).to(OPERAND)
            value = tl.load(value_ptrs + t * stride_mixed, mask=in_t & in_v, other=0.0)
            solve = tl.load(solve_ptr + t * (H * BT) + within, mask=in_t, other=0.0)
            inner = tl.load(inner_ptr + t * (H * BT) + within, mask=in_t, other=0.0)
            read = tl.load(factors_ptr + first + i, mask=inside, other=0.0)
            seen = tl.load(factors_ptr + per_factor + first + i, mask=inside, other=0.0)
            kept = tl.load(factors_ptr + 2 * per_factor + first + i, mask=inside, other=0.0)
            left = tl.load(factors_ptr + 3 * per_factor + first)
            before = state.to(OPERAND)
            known = tl.dot(key, before, input_precision=PRECISION) * seen[:, None]
            wanted = (value.to(tl.float32) - known).to(OPERAND)
            out = tl.dot(query, before, input_precision=PRECISION) * read[:, None]
            written = tl.dot(solve, wanted, input_precision=PRECISION)
            out = tl.dot(inner, written.to(OPERAND), out, input_precision=PRECISION)
            o_ptrs = o_ptr + t * (H * V) + i[:, None] * (H * V) + v[None, :]
            tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=in_t & in_v)
            at_end = (written * kept[:, None]).to(OPERAND)
            state = tl.dot(tl.trans(key), at_end, state * left, input_precision=PRECISION)
        tl.store(state_ptrs, state, mask=(k < keys_kept)[:, None] & in_v)
