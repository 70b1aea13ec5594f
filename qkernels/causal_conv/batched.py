"""Causal convolutions in plain torch, fast enough for a CPU: requests with one row run together.

Legend: see ops.py; n rows of a request, B requests that have one row and no lacking rows.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.reference import inputs_before, keep_inputs_
from qkernels.causal_conv.state import SplitStep, StateStep


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.causal_conv_."""
    return F.silu(_convolved_(x_TC, weight_CW, bias_C, conv_PCL, step)).to(x_TC.dtype)


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Implement ops.short_conv_."""
    b_TC, c_TC, x_TC = mixed_TC.chunk(3, 1)
    y_TC = _convolved_(b_TC * x_TC, weight_CW, bias_C, conv_PCL, step)
    return c_TC * y_TC.to(mixed_TC.dtype)


def _convolved_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Return the convolution [T, C] in float32, or in x's dtype if that is wider."""
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    y_TC = torch.empty(x_TC.shape, dtype=wide, device=x_TC.device)
    split, W, L = SplitStep.of(step, x_TC.device), weight_CW.shape[1], conv_PCL.shape[2]
    if len(split.rows_B):
        new_BC = x_TC[split.rows_B].to(conv_PCL.dtype)
        # positions of the W - 1 inputs before each row
        positions_BW = split.positions_B[:, None] + torch.arange(1 - W, 0, device=x_TC.device)
        kept_BCL = split.gathered(conv_PCL)
        columns_BCW = (positions_BW % L)[:, None].expand(-1, kept_BCL.shape[1], -1)
        before_BCW = kept_BCL.gather(2, columns_BCW)
        before_BCW.masked_fill_((positions_BW < 0)[:, None], 0)
        seen_BCW = torch.cat([before_BCW, new_BC[:, :, None]], 2)
        y_TC[split.rows_B] = (seen_BCW.to(wide) * weight_CW.to(wide)).sum(-1)
        kept_B = split.slots_B >= 0
        conv_PCL[split.slots_B[kept_B], :, split.positions_B[kept_B] % L] = new_BC[kept_B]
    for own in split.others:
        rows = own.rows
        x_Cn = x_TC[rows].T.to(conv_PCL.dtype)
        seen_CL = torch.cat([inputs_before(conv_PCL, own, W - 1), x_Cn], 1)
        taps = (seen_CL[:, w : w + own.count].to(wide) * weight_CW[:, w : w + 1] for w in range(W))
        y_TC[rows] = sum(taps).T
        keep_inputs_(conv_PCL, own, x_Cn)
    return y_TC if bias_C is None else y_TC + bias_C.to(wide)
