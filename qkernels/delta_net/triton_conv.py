"""The convolution of a gated delta net in Triton: one program for some channels of a request.

A program takes all rows of its request, so no other program reads what it keeps for the next step.
Legend as in ops.py; BC channels and BT rows of a tile.
"""

import torch
import triton
import triton.language as tl

from qkernels.delta_net.config import conv_config
from qkernels.delta_net.state import StateStep
from qkernels.gpu.config import ceil_div
from qkernels.gpu.launch import launch, on_device


def causal_conv_(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, conv_PCW: torch.Tensor, step: StateStep
) -> torch.Tensor:
    """Implement ops.causal_conv_."""
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    T, C = x_TC.shape
    y_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    config = conv_config(step.max_query_len)
    with on_device(x_TC):
        launch(
            _causal_conv,
            (step.slots_R.shape[0], ceil_div(C, config.channels)),
            x_TC,
            weight_CW.contiguous(),
            conv_PCW,
            y_TC,
            step.query_starts_R1,
            step.context_lengths_R,
            step.slots_R,
            C,
            x_TC.stride(0),
            W=weight_CW.shape[1],
            BC=config.channels,
            BT=config.rows,
            num_warps=config.warps,
        )
    return y_TC


@triton.jit
def _causal_conv(
    x_ptr,
    weight_ptr,
    conv_ptr,
    y_ptr,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    C,
    stride_x,
    W: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
):
    r = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    start = tl.load(starts_ptr + r)
    count = tl.load(starts_ptr + r + 1) - start
    slot = tl.load(slots_ptr + r)
    goes_on = (slot >= 0) & (tl.load(lengths_ptr + r) > count)
    # Channels of what was kept that are read: all or none.
    channels_read = tl.where(goes_on, C, 0)
    x_ptr += start.to(tl.int64) * stride_x
    y_ptr += start.to(tl.int64) * C
    kept_ptrs = conv_ptr + slot.to(tl.int64) * C * (W - 1) + c * (W - 1)
    for first in range(0, count, BT):
        t = first + tl.arange(0, BT)
        inside = (t < count)[:, None] & in_c[None, :]
        total = tl.zeros((BT, BC), tl.float32)
        for w in tl.static_range(W):
            at = t - (W - 1) + w  # below 0: among those that were kept, the newest last
            weight = tl.load(weight_ptr + c * W + w, mask=in_c, other=0.0).to(tl.float32)
            x = tl.load(
                x_ptr + at.to(tl.int64)[:, None] * stride_x + c[None, :],
                mask=inside & (at >= 0)[:, None],
                other=0.0,
            ).to(tl.float32)
            x += tl.load(
                kept_ptrs[None, :] + (at + (W - 1))[:, None],
                mask=inside & (at < 0)[:, None] & (c < channels_read)[None, :],
                other=0.0,
            ).to(tl.float32)
            total += weight[None, :] * x
        y = total / (1.0 + tl.exp(-total))
        y_ptrs = y_ptr + t.to(tl.int64)[:, None] * C + c[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)
    # Of what was kept all is read before any of it is written over, by whichever thread.
    tl.debug_barrier()
    channels_kept = tl.where((slot >= 0) & (count > 0), C, 0)
    for w in tl.static_range(W - 1):
        at = count - (W - 1) + w
        is_new = c < tl.where(at >= 0, channels_kept, 0)
        new = tl.load(x_ptr + at.to(tl.int64) * stride_x + c, mask=is_new, other=0.0)
        # Places move to the left, and those further right are still as they were.
        is_old = c < tl.where(at < 0, channels_read, 0)
        old = tl.load(kept_ptrs + (at + (W - 1)), mask=is_old, other=0.0)
        tl.debug_barrier()
        tl.store(kept_ptrs + w, tl.where(is_new, new, old), mask=c < channels_kept)
        tl.debug_barrier()
