"""The scan of Mamba-1 in Triton as a recurrence over all rows of a request.

One kernel runs decodes, prompts and verifications. The states of a few channels stay in the
registers of one warp from a request's first row to its last, so each row computes exactly what its
own decode step would. Rows that the state lacks (StateStep) come first, in the same loop. Legend:
see ops.py; BN states and BI channels of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.state import StateStep
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.mamba1.config import scan_config


def channel_scan_(
    x_TI: torch.Tensor,
    dt_TI: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    rates_NI: torch.Tensor,
    skip_I: torch.Tensor,
    memory_P1NI: torch.Tensor,
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement ops.channel_scan_."""
    x_TI, dt_TI, b_TN, c_TN = (
        x if x.stride(1) == 1 else x.contiguous() for x in (x_TI, dt_TI, b_TN, c_TN)
    )
    (T, channels), N = x_TI.shape, rates_NI.shape[0]
    y_TI = torch.empty((T, channels), dtype=x_TI.dtype, device=x_TI.device)
    config = scan_config(N)
    # without speculation, the same kernel runs with no lacking and no kept rows
    newest_rows = 0 if recent_PNI is None else recent_PNI.shape[1]
    with on_device(x_TI):
        launch(
            _channel_rows,
            (ceil_div(channels, config.channels), step.slots_R.shape[0]),
            x_TI,
            dt_TI,
            b_TN,
            c_TN,
            rates_NI,
            skip_I,
            memory_P1NI,
            y_TI,
            x_TI if recent_PNI is None else recent_PNI,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            step.slots_R if step.lacking_R is None else step.lacking_R,
            newest_rows,
            x_TI.stride(0),
            dt_TI.stride(0),
            b_TN.stride(0),
            c_TN.stride(0),
            CHANNELS=channels,
            N=N,
            BN=config.state,
            BI=config.channels,
            num_warps=config.warps,
        )
    return y_TI


@triton.jit
def _updated(state, x, dt, b, rates):
    """The states of the channels after a token."""
    wide = dt.to(tl.float32)
    size = tl.where(wide > 20.0, wide, tl.log(1.0 + tl.exp(tl.minimum(wide, 20.0))))
    written = b.to(tl.float32)[:, None] * (size * x.to(tl.float32))[None, :]
    return state * tl.exp(rates * size[None, :]) + written


@triton.jit
def _load_row(
    t,  # negative: a row that the state lacks
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    inputs_ptr,
    i,
    n,
    in_i,
    in_n,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    CHANNELS: tl.constexpr,
):
    """x and dt [BI], B and C [BN] of one row. A lacking row has no C."""
    row, is_old = tl.cast(tl.maximum(t, 0), tl.int64), t < 0
    own_x, own_dt = x_ptr + row * stride_x, dt_ptr + row * stride_dt
    own_b = tl.where(is_old, inputs_ptr + 2 * CHANNELS, b_ptr + row * stride_b)
    x = tl.load(tl.where(is_old, inputs_ptr, own_x) + i, mask=in_i, other=0.0)
    dt = tl.load(tl.where(is_old, inputs_ptr + CHANNELS, own_dt) + i, mask=in_i, other=0.0)
    b = tl.load(own_b + n, mask=in_n, other=0.0)
    c = tl.load(c_ptr + row * stride_c + n, mask=in_n, other=0.0)
    return x, dt, b, c


@triton.jit(do_not_specialize=["newest_rows"])
def _channel_rows(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    rates_ptr,
    skip_ptr,
    memory_ptr,
    y_ptr,
    recent_ptr,  # [P, newest_rows, INPUTS]: x, dt and B
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    lacking_ptr,
    newest_rows,  # 0: no row is ever rejected
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    BI: tl.constexpr,
):
    r = tl.program_id(1)
    first = tl.load(starts_ptr + r).to(tl.int64)
    count = (tl.load(starts_ptr + r + 1) - first).to(tl.int32)
    if count > 0:
        slot = tl.load(slots_ptr + r)
        position = tl.load(lengths_ptr + r) - count  # of the first row
        goes_on = (slot >= 0) & (position > 0)
        lacking = tl.where(newest_rows > 0, tl.load(lacking_ptr + r), 0)
        # the stored state does not include the rows of a verification; their inputs are kept
        is_verify = (count > 1) & (count <= newest_rows // 2)
        # States that are read and written: all or none.
        states_read, states_kept = tl.where(goes_on, N, 0), tl.where(slot >= 0, N, 0)
        n = tl.arange(0, BN)
        i = tl.program_id(0) * BI + tl.arange(0, BI)
        in_n, in_i = n < N, i < CHANNELS
        inside = in_n[:, None] & in_i[None, :]
        at_tile = n[:, None] * CHANNELS + i[None, :]
        state_ptrs = memory_ptr + slot.to(tl.int64) * N * CHANNELS + at_tile
        state_mask = (n < states_kept)[:, None] & in_i[None, :]
        were_there = (n < states_read)[:, None] & in_i[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        rates = tl.load(rates_ptr + at_tile, mask=inside, other=0.0)
        skip = tl.load(skip_ptr + i, mask=in_i, other=0.0)
        INPUTS: tl.constexpr = 2 * CHANNELS + N
        x_ptr += first * stride_x
        dt_ptr += first * stride_dt
        b_ptr += first * stride_b
        c_ptr += first * stride_c
        y_ptr += first * CHANNELS
        ring = tl.maximum(newest_rows, 1)
        recent_ptr += slot.to(tl.int64) * newest_rows * INPUTS
        # all programs of a request have the same B; the first program stores it
        keeps = is_verify & (slot >= 0)
        i_new = tl.where(keeps, CHANNELS, 0)
        n_new = tl.where(keeps & (tl.program_id(0) == 0), N, 0)
        at = (position - lacking) % ring
        inputs_ptr = recent_ptr + at * INPUTS
        x, dt, b, c = _load_row(
            -lacking,
            x_ptr,
            dt_ptr,
            b_ptr,
            c_ptr,
            inputs_ptr,
            i,
            n,
            in_i,
            in_n,
            stride_x,
            stride_dt,
            stride_b,
            stride_c,
            CHANNELS,
        )
        for t in tl.range(-lacking, count):
            # prefetch the next row, whose loads depend on no sum; the last row loads itself again
            at = tl.where(at + 1 < ring, at + 1, 0)
            next_inputs_ptr = recent_ptr + at * INPUTS
            next_x, next_dt, next_b, next_c = _load_row(
                tl.minimum(t + 1, count - 1),
                x_ptr,
                dt_ptr,
                b_ptr,
                c_ptr,
                next_inputs_ptr,
                i,
                n,
                in_i,
                in_n,
                stride_x,
                stride_dt,
                stride_b,
                stride_c,
                CHANNELS,
            )
            if is_verify & (t >= 0):
                if t == 0:
                    tl.store(state_ptrs, state, mask=state_mask)
                tl.store(inputs_ptr + i, x, mask=i < i_new)
                tl.store(inputs_ptr + CHANNELS + i, dt, mask=i < i_new)
                tl.store(inputs_ptr + 2 * CHANNELS + n, b, mask=n < n_new)
            state = _updated(state, x, dt, b, rates)
            y = tl.sum(c.to(tl.float32)[:, None] * state, 0) + skip * x.to(tl.float32)
            y_ptrs = y_ptr + tl.cast(t, tl.int64) * CHANNELS + i
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=i < tl.where(t >= 0, CHANNELS, 0))
            x, dt, b, c = next_x, next_dt, next_b, next_c
            inputs_ptr = next_inputs_ptr
        kept = tl.where(is_verify, 0, states_kept)
        tl.store(state_ptrs, state, mask=(n < kept)[:, None] & in_i[None, :])
