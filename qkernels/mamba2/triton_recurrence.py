"""The scan of Mamba-2 in Triton as a recurrence over all rows of a request.

One compiled kernel for decodes and prompts: the state stays in registers from a request's first row
to its last, and each row computes what a decode of it alone would. A program is one warp and takes
a few columns of a head's state. Legend as in ops.py; BN states and BD columns of a tile.
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
) -> torch.Tensor:
    """Implement ops.selective_scan_."""
    mixed_TC, dt_TH = (x if x.stride(1) == 1 else x.contiguous() for x in (mixed_TC, dt_TH))
    T, C = mixed_TC.shape
    _, H, N, D = memory_PHND.shape
    y_THD = torch.empty((T, H, D), dtype=mixed_TC.dtype, device=mixed_TC.device)
    config = recurrence_config(N, D)
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
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
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
def _load_row(x_ptrs, b_ptrs, dt_ptr, in_d, in_n, G: tl.constexpr, N: tl.constexpr):
    """x [BD], B and C [BN], and the step of one row and head."""
    x = tl.load(x_ptrs, mask=in_d, other=0.0)
    b = tl.load(b_ptrs, mask=in_n, other=0.0)
    c = tl.load(b_ptrs + G * N, mask=in_n, other=0.0)
    return x, b, c, tl.load(dt_ptr)


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
        goes_on = (slot >= 0) & (tl.load(lengths_ptr + r) > count)
        # States that are read and written: all or none.
        states_read, states_kept = tl.where(goes_on, N, 0), tl.where(slot >= 0, N, 0)
        n = tl.arange(0, BN)
        d = tl.program_id(0) * BD + tl.arange(0, BD)
        in_n, in_d = n < N, d < D
        place = (slot.to(tl.int64) * H + h) * N * D
        state_ptrs = memory_ptr + place + n[:, None] * D + d[None, :]
        were_there = (n < states_read)[:, None] & in_d[None, :]
        state = tl.load(state_ptrs, mask=were_there, other=0.0)
        decay, dt_bias = -tl.exp(tl.load(a_log_ptr + h)), tl.load(dt_bias_ptr + h)
        skip = tl.load(skip_ptr + h)
        mixed_ptr += first * stride_mixed
        x_ptrs = mixed_ptr + h * D + d
        b_ptrs = mixed_ptr + H * D + h // (H // G) * N + n
        dt_ptr += first * stride_dt + h
        y_ptrs = y_ptr + (first * H + h) * D + d
        x, b, c, dt = _load_row(x_ptrs, b_ptrs, dt_ptr, in_d, in_n, G, N)
        for t in tl.range(0, count):
            # The next row's loads depend on no sum; the last row loads itself again.
            after = tl.minimum(t + 1, count - 1).to(tl.int64)
            moved = after * stride_mixed
            next_x, next_b, next_c, next_dt = _load_row(
                x_ptrs + moved, b_ptrs + moved, dt_ptr + after * stride_dt, in_d, in_n, G, N
            )
            size = step_size(dt, dt_bias, dt_least, dt_most)
            wide = x.to(tl.float32)
            state = updated(state, wide, b.to(tl.float32), size, decay)
            y = tl.sum(c.to(tl.float32)[:, None] * state, 0) + skip * wide
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=in_d)
            y_ptrs += H * D
            x, b, c, dt = next_x, next_b, next_c, next_dt
        tl.store(state_ptrs, state, mask=(n < states_kept)[:, None] & in_d[None, :])
