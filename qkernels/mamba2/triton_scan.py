"""The scan of Mamba-2 in Triton: few rows of a request one after the other, prompts in chunks.

A program holds some columns of a head's state of one request in registers over all of its rows or
chunks. Without `recent_PNI`, few means one row. With it, few means up to the rows of a
verification, and rows that the state lacks are applied first, for prompts before their chunks read
the state. Within a chunk the outputs are matrix products (the dual form of Dao and Gu, 2024).
Legend: see ops.py; BT rows, BN states and BD columns of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.mamba2.config import scan_config, step_config

# exp(-50) times a number is below the number's float32 rounding. With this bound, sums of such
# logarithms stay small enough for their differences to be exact to 2e-4.
MIN_DECAY_LOG = tl.constexpr(-50.0)


def selective_scan_(
    mixed_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    skip_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHND: torch.Tensor,
    dt_limits: tuple[float, float],
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement ops.selective_scan_."""
    mixed_TC, dt_TH = (x if x.stride(1) == 1 else x.contiguous() for x in (mixed_TC, dt_TH))
    T, C = mixed_TC.shape
    _, H, N, D = memory_PHND.shape
    R = step.slots_R.shape[0]
    y_THD = torch.empty((T, H, D), dtype=mixed_TC.dtype, device=mixed_TC.device)
    tensors = (
        *(mixed_TC, dt_TH, a_log_H, skip_H, dt_bias_H, memory_PHND, y_THD),
        *(step.query_starts_R1, step.context_lengths_R, step.slots_R),
        *(mixed_TC.stride(0), dt_TH.stride(0), *dt_limits),
    )
    sizes = {"G": (C - H * D) // (2 * N), "H": H, "N": N, "D": D}
    newest_rows = 0 if recent_PNI is None else recent_PNI.shape[1]
    few, config = max(1, newest_rows // 2), step_config(N, D)
    with on_device(mixed_TC):
        # run in any case: max_query_len is an upper bound, and all requests may be short
        launch(
            _mamba_rows,
            (R, H, ceil_div(D, config.columns)),
            *tensors,
            memory_PHND if recent_PNI is None else recent_PNI,
            step.slots_R if step.lacking_R is None else step.lacking_R,
            **sizes,
            NEWEST=newest_rows,
            BN=config.state,
            BD=config.columns,
            num_warps=config.warps,
        )
        if step.max_query_len > few:
            scan = scan_config(N, D, mixed_TC.dtype)
            launch(
                _mamba_chunks,
                (R, H, ceil_div(D, scan.columns)),
                *tensors,
                **sizes,
                FEW=few,
                BT=scan.rows,
                BN=scan.state,
                BD=scan.columns,
                OPERAND=_TRITON_TYPES[scan.operands],
                PRECISION=scan.precision,
                STAGES=scan.stages,
                num_warps=scan.warps,
            )
    return y_THD


_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def step_size(dt, dt_bias, least, most):
    """Return softplus(dt + dt_bias), clamped to [least, most]."""
    x = dt.to(tl.float32) + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.minimum(tl.maximum(softplus, least), most)


@triton.jit
def updated(state, x, b, size, decay):
    """Return the state's columns after a token. decay: -exp(a_log)."""
    return state * tl.exp(decay * size) + b[:, None] * (size * x)[None, :]


@triton.jit
def _mamba_rows(
    mixed_ptr,
    dt_ptr,
    a_log_ptr,
    skip_ptr,
    dt_bias_ptr,
    memory_ptr,
    y_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    stride_mixed,
    stride_dt,
    dt_least,
    dt_most,
    recent_ptr,
    lacking_ptr,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    NEWEST: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    r, h = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts_ptr + r)
    count = tl.load(starts_ptr + r + 1) - first
    slot = tl.load(slots_ptr + r)
    lacking = 0
    if NEWEST > 0:
        lacking = tl.load(lacking_ptr + r)
    MOST: tl.constexpr = NEWEST // 2 if NEWEST > 1 else 1
    is_few = (count > 0) & (count <= MOST)
    if is_few | (lacking > 0):
        position = tl.load(lengths_ptr + r) - count  # of the first row
        goes_on = (slot >= 0) & (position > 0)
        # States that are read and written: all or none.
        states_read, states_kept = tl.where(goes_on, N, 0), tl.where(slot >= 0, N, 0)
        n = tl.arange(0, BN)
        d = tl.program_id(2) * BD + tl.arange(0, BD)
        in_n, in_d = n < N, d < D
        place = (slot.to(tl.int64) * H + h) * N * D
        state_ptrs = memory_ptr + place + n[:, None] * D + d[None, :]
        state_mask = (n < states_kept)[:, None] & in_d[None, :]
        were_there = (n < states_read)[:, None] & in_d[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        decay, dt_bias = -tl.exp(tl.load(a_log_ptr + h)), tl.load(dt_bias_ptr + h)
        skip = tl.load(skip_ptr + h)
        group = h // (H // G) * N
        # Rows of `recent` are x, B and dt.
        X: tl.constexpr = H * D
        INPUTS: tl.constexpr = X + G * N + H
        if NEWEST > 0:
            recent_ptr += slot.to(tl.int64) * NEWEST * INPUTS
            for i in range(0, lacking):
                inputs_ptr = recent_ptr + (position - lacking + i) % NEWEST * INPUTS
                x = tl.load(inputs_ptr + h * D + d, mask=in_d, other=0.0).to(tl.float32)
                b = tl.load(inputs_ptr + X + group + n, mask=in_n, other=0.0).to(tl.float32)
                size = step_size(tl.load(inputs_ptr + X + G * N + h), dt_bias, dt_least, dt_most)
                state = updated(state, x, b, size, decay)
            if count > 1:
                tl.store(state_ptrs, state, mask=state_mask)
        # several programs have the same inputs; the first program stores them
        keeps = (count > 1) & (slot >= 0)
        keeps_dt = keeps & (tl.program_id(2) == 0)
        b_new = tl.where(keeps_dt & (h % (H // G) == 0), N, 0)
        x_new, dt_new = tl.where(keeps, D, 0), tl.where(keeps_dt, 1, 0)
        one = tl.arange(0, 1)
        for i in range(0, tl.where(is_few, count, 0)):
            row = (first + i).to(tl.int64)
            row_ptr = mixed_ptr + row * stride_mixed
            b_ptrs = row_ptr + X + group + n
            x = tl.load(row_ptr + h * D + d, mask=in_d, other=0.0)
            b = tl.load(b_ptrs, mask=in_n, other=0.0)
            c = tl.load(b_ptrs + G * N, mask=in_n, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row * stride_dt + h)
            if NEWEST > 0:
                inputs_ptr = recent_ptr + (position + i) % NEWEST * INPUTS
                tl.store(inputs_ptr + h * D + d, x, mask=d < x_new)
                tl.store(inputs_ptr + X + group + n, b, mask=n < b_new)
                tl.store(inputs_ptr + X + G * N + h + one, dt, mask=one < dt_new)
            x, b = x.to(tl.float32), b.to(tl.float32)
            state = updated(state, x, b, step_size(dt, dt_bias, dt_least, dt_most), decay)
            y = tl.sum(c[:, None] * state, 0) + skip * x
            tl.store(y_ptr + (row * H + h) * D + d, y.to(y_ptr.dtype.element_ty), mask=in_d)
        if count == 1:
            tl.store(state_ptrs, state, mask=state_mask)


@triton.jit
def _mamba_chunks(
    mixed_ptr,
    dt_ptr,
    a_log_ptr,
    skip_ptr,
    dt_bias_ptr,
    memory_ptr,
    y_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    stride_mixed,
    stride_dt,
    dt_least,
    dt_most,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    FEW: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    r, h = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + r)
    count = tl.load(starts_ptr + r + 1) - start
    if count > FEW:
        slot = tl.load(slots_ptr + r)
        goes_on = (slot >= 0) & (tl.load(lengths_ptr + r) > count)
        # States that are read and written: all or none.
        states_read, states_kept = tl.where(goes_on, N, 0), tl.where(slot >= 0, N, 0)
        t, n = tl.arange(0, BT), tl.arange(0, BN)
        d = tl.program_id(2) * BD + tl.arange(0, BD)
        in_n, in_d = (n < N)[None, :], (d < D)[None, :]
        place = (slot.to(tl.int64) * H + h) * N * D
        state_ptrs = memory_ptr + place + n[:, None] * D + d[None, :]
        state = tl.load(state_ptrs, mask=(n < states_read)[:, None] & in_d, other=0.0)
        a, dt_bias = -tl.exp(tl.load(a_log_ptr + h)), tl.load(dt_bias_ptr + h)
        skip = tl.load(skip_ptr + h)
        base = start.to(tl.int64)
        row_ptrs = mixed_ptr + base * stride_mixed + t[:, None] * stride_mixed
        b_ptrs = row_ptrs + H * D + h // (H // G) * N + n[None, :]
        x_ptrs = row_ptrs + h * D + d[None, :]
        dt_ptrs = dt_ptr + base * stride_dt + t * stride_dt + h
        y_ptrs = y_ptr + (base * H + h) * D + t[:, None] * (H * D) + d[None, :]
        causal = t[:, None] >= t[None, :]
        for first in tl.range(0, count, BT, num_stages=STAGES):
            done = tl.cast(first, tl.int64)
            inside = t < count - first
            in_t = inside[:, None]
            moved = done * stride_mixed
            x = tl.load(x_ptrs + moved, mask=in_t & in_d, other=0.0)
            b = tl.load(b_ptrs + moved, mask=in_t & in_n, other=0.0).to(OPERAND)
            c = tl.load(b_ptrs + G * N + moved, mask=in_t & in_n, other=0.0).to(OPERAND)
            dt = tl.load(dt_ptrs + done * stride_dt, mask=inside, other=0.0)
            # rows after the end leave the state unchanged
            size = tl.where(inside, step_size(dt, dt_bias, dt_least, dt_most), 0.0)
            total = tl.cumsum(tl.maximum(a * size, MIN_DECAY_LOG), 0)
            whole = tl.sum(tl.maximum(a * size, MIN_DECAY_LOG), 0)
            between = tl.where(causal, total[:, None] - total[None, :], float("-inf"))
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * tl.exp(between)
            written = (size[:, None] * x.to(tl.float32)).to(OPERAND)
            y = tl.dot(c, state.to(OPERAND), input_precision=PRECISION) * tl.exp(total)[:, None]
            y = tl.dot(scores.to(OPERAND), written, y, input_precision=PRECISION)
            y += skip * x.to(tl.float32)
            tl.store(y_ptrs + done * (H * D), y.to(y_ptr.dtype.element_ty), mask=in_t & in_d)
            b_end = (b.to(tl.float32) * tl.exp(whole - total)[:, None]).to(OPERAND)
            state = tl.dot(
                tl.trans(b_end), written, state * tl.exp(whole), input_precision=PRECISION
            )
        tl.store(state_ptrs, state, mask=(n < states_kept)[:, None] & in_d)
