"""Causal convolutions in Triton: a program computes some channels of some rows of a request.

Only the program of a request's first rows reads and writes the inputs that are kept from step to
step. Legend: see ops.py; BC channels and BT rows of a program.
"""

import torch
import triton
import triton.language as tl

from qkernels.causal_conv.config import conv_config
from qkernels.causal_conv.state import StateStep
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.row_blocks import request_of


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.causal_conv_."""
    return _run_(x_TC, weight_CW, bias_C, conv_PCL, step, gated=False)


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.short_conv_."""
    return _run_(mixed_TC, weight_CW, bias_C, conv_PCL, step, gated=True)


def _run_(
    x: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
    *,
    gated: bool,
) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    (T, _), C, R = x.shape, weight_CW.shape[0], step.slots_R.shape[0]
    y_TC = torch.empty((T, C), dtype=x.dtype, device=x.device)
    L, W = conv_PCL.shape[2], weight_CW.shape[1]
    config = conv_config(step.max_query_len, L - (W - 1))
    # with several rows per block, request r owns the blocks from query_starts[r] // BT + r on
    blocks = R if config.rows == 1 else T // config.rows + R
    with on_device(x):
        launch(
            _causal_conv,
            (blocks, ceil_div(C, config.channels)),
            x,
            weight_CW.contiguous(),
            weight_CW if bias_C is None else bias_C.contiguous(),
            conv_PCL,
            y_TC,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            R,
            C,
            x.stride(0),
            W=W,
            L=L,
            HAS_BIAS=bias_C is not None,
            GATED=gated,
            BC=config.channels,
            BT=config.rows,
            num_warps=config.warps,
        )
    return y_TC


@triton.jit
def _input(x_ptrs, C, mask, GATED: tl.constexpr):
    """Load inputs of the convolution: x, or if GATED b * x, rounded. A gated row is b, c, x."""
    if GATED:
        b = tl.load(x_ptrs, mask=mask, other=0.0)
        return b * tl.load(x_ptrs + 2 * C, mask=mask, other=0.0)
    return tl.load(x_ptrs, mask=mask, other=0.0)


@triton.jit
def _output(total, x_ptrs, C, mask, DTYPE: tl.constexpr, GATED: tl.constexpr):
    """Return silu of the convolution's result, or if GATED its product with c."""
    if GATED:
        c = tl.load(x_ptrs + C, mask=mask, other=0.0)
        return c * total.to(DTYPE)
    return (total / (1.0 + tl.exp(-total))).to(DTYPE)


@triton.jit
def _keep_(
    x_ptr,
    kept_ptrs,
    c,
    C,
    start,
    count,
    channels_kept,
    stride_x,
    L: tl.constexpr,
    GATED: tl.constexpr,
):
    """Store the last L inputs of a request's channels `c`: `count` rows from position `start`."""
    mask = c < channels_kept
    for at in range(tl.maximum(count - L, 0), count):
        new = _input(x_ptr + tl.cast(at, tl.int64) * stride_x + c, C, mask, GATED)
        tl.store(kept_ptrs + (start + at) % L, new, mask=mask)


@triton.jit(do_not_specialize=["R"])
def _causal_conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    conv_ptr,
    y_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    R,
    C,
    stride_x,
    W: tl.constexpr,
    L: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    block = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    # if BT is 1, each request has at most one row
    r = block if BT == 1 else request_of(starts_ptr, block, R, BT)
    start = tl.load(starts_ptr + r)
    count = tl.load(starts_ptr + r + 1) - start
    first = 0 if BT == 1 else (block - start // BT - r) * BT
    if first >= count:
        return
    slot = tl.load(slots_ptr + r)
    position = tl.load(lengths_ptr + r) - count  # position of the first row
    # kept inputs are read for all channels or for none
    channels_read = tl.where((slot >= 0) & (position > 0), C, 0)
    x_ptr += start.to(tl.int64) * stride_x
    y_ptr += start.to(tl.int64) * C
    kept_ptrs = conv_ptr + slot.to(tl.int64) * C * L + c * L
    t = first + tl.arange(0, BT)
    inside = (t < count)[:, None] & in_c[None, :]
    total = tl.zeros((BT, BC), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        at = t - (W - 1) + w  # negative: a kept input
        weight = tl.load(weight_ptr + c * W + w, mask=in_c, other=0.0).to(tl.float32)
        x_ptrs = x_ptr + at.to(tl.int64)[:, None] * stride_x + c[None, :]
        x = _input(x_ptrs, C, inside & (at >= 0)[:, None], GATED).to(tl.float32)
        before = (at < 0) & (position + at >= 0)
        x += tl.load(
            kept_ptrs[None, :] + ((position + at) % L)[:, None],
            mask=inside & before[:, None] & (c < channels_read)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += weight[None, :] * x
    rows = t.to(tl.int64)[:, None]
    y = _output(total, x_ptr + rows * stride_x + c[None, :], C, inside, DTYPE, GATED)
    tl.store(y_ptr + rows * C + c[None, :], y, mask=inside)
    if first == 0:
        # all threads have read the kept inputs before any thread overwrites them
        tl.debug_barrier()
        channels_kept = tl.where(slot >= 0, C, 0)
        _keep_(x_ptr, kept_ptrs, c, C, position, count, channels_kept, stride_x, L, GATED)
