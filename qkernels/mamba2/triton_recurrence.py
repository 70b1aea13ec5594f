"""The scan of Mamba-2 in Triton as a recurrence over all rows of a request.

One compiled kernel runs decodes, prompts and verifications, with and without speculation. The state
stays in registers from a request's first row to its last, and each row computes exactly what its
own decode step would. Rows that the state lacks (StateStep) come first, in the same loop. A program
is one warp with a few columns of a head's state. Legend: see ops.py; BN states and BD columns of a
tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.mamba2.config import recurrence_config
from qkernels.mamba2.triton_scan import step_size, updated


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
    y_THD = torch.empty((T, H, D), dtype=mixed_TC.dtype, device=mixed_TC.device)
    config = recurrence_config(N, D)
    # without speculation, the same kernel runs with no lacking and no kept rows
    newest_rows = 0 if recent_PNI is None else recent_PNI.shape[1]
    with on_device(mixed_TC):
        launch(
            _mamba_rows,
            (ceil_div(D, config.columns), H, step.slots_R.shape[0]),
            mixed_TC,
            dt_TH,
            a_log_H,
            skip_H,
            dt_bias_H,
            memory_PHND,
            y_THD,
            mixed_TC if recent_PNI is None else recent_PNI,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            step.slots_R if step.lacking_R is None else step.lacking_R,
            newest_rows,
            mixed_TC.stride(0),
            dt_TH.stride(0),
            *dt_limits,
            G=(C - H * D) // (2 * N),
            H=H,
            N=N,
            D=D,
            BN=config.state,
            BD=config.columns,
            num_warps=config.warps,
        )
    return y_THD


@triton.jit
def _load_row(
    t,  # negative: a row that the state lacks
    mixed_ptr,
    dt_ptr,
    inputs_ptr,
    x_at,
    b_at,
    c_at,
    dt_at,
    in_d,
    in_n,
    stride_mixed,
    stride_dt,
):
    """Load x [BD], B and C [BN], and the step of one row and head.

    C of a lacking row is not used.
    """
    row, is_old = tl.cast(tl.maximum(t, 0), tl.int64), t < 0
    row_ptr = mixed_ptr + row * stride_mixed
    c = tl.load(row_ptr + c_at, mask=in_n, other=0.0)
    base_ptr = tl.where(is_old, inputs_ptr, row_ptr)
    x = tl.load(base_ptr + x_at, mask=in_d, other=0.0)
    b = tl.load(base_ptr + b_at, mask=in_n, other=0.0)
    return x, b, c, tl.load(tl.where(is_old, inputs_ptr + dt_at, dt_ptr + row * stride_dt))


@triton.jit(do_not_specialize=["newest_rows"])
def _mamba_rows(
    mixed_ptr,
    dt_ptr,
    a_log_ptr,
    skip_ptr,
    dt_bias_ptr,
    memory_ptr,
    y_ptr,
    recent_ptr,  # [P, newest_rows, INPUTS]: x, B and dt
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    lacking_ptr,
    newest_rows,  # 0: no row is ever rejected
    stride_mixed,
    stride_dt,
    dt_least,
    dt_most,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    h, r = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + r).to(tl.int64)
    count = (tl.load(starts_ptr + r + 1) - first).to(tl.int32)
    if count > 0:
        slot = tl.load(slots_ptr + r)
        position = tl.load(lengths_ptr + r) - count  # of the first row
        goes_on = (slot >= 0) & (position > 0)
        lacking = tl.where(newest_rows > 0, tl.load(lacking_ptr + r), 0)
        # the stored state does not include the rows of a verification; their inputs are kept
        is_verify = (count > 1) & (count <= newest_rows // 2)
        # number of state rows to read and to write: N or 0
        states_read, states_kept = tl.where(goes_on, N, 0), tl.where(slot >= 0, N, 0)
        n = tl.arange(0, BN)
        d = tl.program_id(0) * BD + tl.arange(0, BD)
        in_n, in_d = n < N, d < D
        place = (slot.to(tl.int64) * H + h) * N * D
        state_ptrs = memory_ptr + place + n[:, None] * D + d[None, :]
        state_mask = (n < states_kept)[:, None] & in_d[None, :]
        were_there = (n < states_read)[:, None] & in_d[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        decay, dt_bias = -tl.exp(tl.load(a_log_ptr + h)), tl.load(dt_bias_ptr + h)
        skip = tl.load(skip_ptr + h)
        x_at, b_at = h * D + d, H * D + h // (H // G) * N + n
        dt_at = H * D + G * N + h  # index in a row of `recent`
        INPUTS: tl.constexpr = H * D + G * N + H
        mixed_ptr += first * stride_mixed
        dt_ptr += first * stride_dt + h
        y_ptr += (first * H + h) * D
        ring = tl.maximum(newest_rows, 1)
        recent_ptr += slot.to(tl.int64) * newest_rows * INPUTS
        # several programs have the same inputs; the first program stores them
        keeps = is_verify & (slot >= 0)
        keeps_dt = keeps & (tl.program_id(0) == 0)
        b_new = tl.where(keeps_dt & (h % (H // G) == 0), N, 0)
        x_new, dt_new = tl.where(keeps, D, 0), tl.where(keeps_dt, 1, 0)
        one = tl.arange(0, 1)
        at = (position - lacking) % ring
        inputs_ptr = recent_ptr + at * INPUTS
        x, b, c, dt = _load_row(
            -lacking,
            mixed_ptr,
            dt_ptr,
            inputs_ptr,
            x_at,
            b_at,
            b_at + G * N,
            dt_at,
            in_d,
            in_n,
            stride_mixed,
            stride_dt,
        )
        for t in tl.range(-lacking, count):
            # load the next row before the sums of this one; after the last row, load it again
            after = tl.minimum(t + 1, count - 1)
            at = tl.where(at + 1 < ring, at + 1, 0)
            next_inputs_ptr = recent_ptr + at * INPUTS
            next_x, next_b, next_c, next_dt = _load_row(
                after,
                mixed_ptr,
                dt_ptr,
                next_inputs_ptr,
                x_at,
                b_at,
                b_at + G * N,
                dt_at,
                in_d,
                in_n,
                stride_mixed,
                stride_dt,
            )
            if is_verify & (t >= 0):
                if t == 0:
                    tl.store(state_ptrs, state, mask=state_mask)
                tl.store(inputs_ptr + x_at, x, mask=d < x_new)
                tl.store(inputs_ptr + b_at, b, mask=n < b_new)
                tl.store(inputs_ptr + dt_at + one, dt, mask=one < dt_new)
            size = step_size(dt, dt_bias, dt_least, dt_most)
            wide = x.to(tl.float32)
            state = updated(state, wide, b.to(tl.float32), size, decay)
            y = tl.sum(c.to(tl.float32)[:, None] * state, 0) + skip * wide
            y_ptrs = y_ptr + tl.cast(t, tl.int64) * (H * D) + d
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=d < tl.where(t >= 0, D, 0))
            x, b, c, dt = next_x, next_b, next_c, next_dt
            inputs_ptr = next_inputs_ptr
        kept = tl.where(is_verify, 0, states_kept)
        tl.store(state_ptrs, state, mask=(n < kept)[:, None] & in_d[None, :])
