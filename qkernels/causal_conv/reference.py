"""Plain torch references of the causal convolutions, one request after the other.

Legend: T tokens of a step, C channels, W taps, P slots, L inputs that are kept.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import StateRows, StateStep, requests_of


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Return silu of a convolution of each channel over time; `conv_PCL` keeps L inputs."""
    y_TC = torch.empty_like(x_TC)
    for each in requests_of(step):
        rows = each.rows
        y_Cn = _one_request_(x_TC[rows], weight_CW, bias_C, conv_PCL, each)
        y_TC[rows] = F.silu(y_Cn).T.to(y_TC.dtype)
    return y_TC


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Return c * conv(b * x), a convolution of each channel over time.

    `mixed_TC` is b, c and x, concatenated. `conv_PCL` keeps the last L products b * x.
    """
    b_TC, c_TC, x_TC = mixed_TC.chunk(3, 1)
    product_TC, y_TC = b_TC * x_TC, torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    for each in requests_of(step):
        rows = each.rows
        y_Cn = _one_request_(product_TC[rows], weight_CW, bias_C, conv_PCL, each)
        y_TC[rows] = c_TC[rows] * y_Cn.T.to(y_TC.dtype)
    return y_TC


def _one_request_(
    x_nC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCL: torch.Tensor,
    own: StateRows,
) -> torch.Tensor:
    """Return the convolution [C, n] of one request's rows, in float32 or x's dtype if wider."""
    wide = torch.promote_types(x_nC.dtype, torch.float32)
    before_CW = inputs_before(conv_PCL, own, weight_CW.shape[1] - 1)
    seen_CL = torch.cat([before_CW, x_nC.T.to(conv_PCL.dtype)], 1)
    windows_CnW = seen_CL.unfold(1, weight_CW.shape[1], 1).to(wide)
    y_Cn = (windows_CnW * weight_CW[:, None].to(wide)).sum(-1)
    keep_inputs_(conv_PCL, own, x_nC.T)
    return y_Cn if bias_C is None else y_Cn + bias_C[:, None].to(wide)


def inputs_before(conv_PCL: torch.Tensor, own: StateRows, count: int) -> torch.Tensor:
    """Return the `count` inputs [C, count] before a request's rows; zeros before position 0."""
    positions = torch.arange(own.start - count, own.start, device=conv_PCL.device)
    found = conv_PCL[own.slot][:, positions % conv_PCL.shape[2]]
    found[:, positions < 0] = 0
    return torch.zeros_like(found) if own.is_first else found


def keep_inputs_(conv_PCL: torch.Tensor, own: StateRows, x_Cn: torch.Tensor) -> None:
    """Store the newest inputs of a request in its slot."""
    if own.slot < 0:
        return
    L, end = conv_PCL.shape[2], own.start + x_Cn.shape[1]
    newest_Cn = x_Cn[:, -L:]
    positions = torch.arange(end - newest_Cn.shape[1], end, device=conv_PCL.device)
    conv_PCL[own.slot, :, positions % L] = newest_Cn.to(conv_PCL.dtype)


def lacking_rows_(covered_P: torch.Tensor, step: StateStep, most_rows: int) -> torch.Tensor:
    """Reference of ops.lacking_rows_."""
    lacking_R = torch.zeros_like(step.slots_R)
    starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
    for r, slot in enumerate(step.slots_R.tolist()):
        count = starts[r + 1] - starts[r]
        if not count or slot < 0:
            continue
        start = lengths[r] - count
        if start > 0:
            lacking_R[r] = min(max(start - int(covered_P[slot]), 0), most_rows)
        covered_P[slot] = start if 1 < count <= most_rows else start + count
    return lacking_R
