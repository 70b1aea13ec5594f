"""Causal convolutions in plain torch, fast enough for a CPU: requests of one row run together.

Legend as in ops.py; n rows of a request, B requests of one row.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import SplitStep, StateStep


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.causal_conv_."""
    return F.silu(_convolved_(x_TC, weight_CW, bias_C, conv_PCW, step)).to(x_TC.dtype)


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.short_conv_."""
    b_TC, c_TC, x_TC = mixed_TC.chunk(3, 1)
    y_TC = _convolved_(b_TC * x_TC, weight_CW, bias_C, conv_PCW, step)
    return c_TC * y_TC.to(mixed_TC.dtype)


def _convolved_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Convolution [T, C] in float32, or wider where x is."""
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    y_TC = torch.empty(x_TC.shape, dtype=wide, device=x_TC.device)
    split, W = SplitStep.of(step, x_TC.device), weight_CW.shape[1]
    if len(split.rows_B):
        new_BC1 = x_TC[split.rows_B, :, None].to(conv_PCW.dtype)
        seen_BCW = torch.cat([split.gathered(conv_PCW), new_BC1], 2)
        y_TC[split.rows_B] = (seen_BCW.to(wide) * weight_CW.to(wide)).sum(-1)
        split.scatter_(conv_PCW, seen_BCW[:, :, 1:])
    for rows, slot, is_first in split.others:
        before_CW = torch.zeros_like(conv_PCW[0]) if is_first else conv_PCW[slot]
        seen_CL = torch.cat([before_CW, x_TC[rows].T.to(conv_PCW.dtype)], 1)
        n = rows.stop - rows.start
        taps = (seen_CL[:, w : w + n].to(wide) * weight_CW[:, w : w + 1] for w in range(W))
        y_TC[rows] = sum(taps).T
        if slot >= 0:
            conv_PCW[slot] = seen_CL[:, seen_CL.shape[1] - before_CW.shape[1] :]
    return y_TC if bias_C is None else y_TC + bias_C.to(wide)
