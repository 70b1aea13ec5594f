"""Causal convolutions in plain torch, one request after the other: the definition.

Legend: T tokens of a step, C channels, W taps, P slots.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import StateStep, requests_of


def causal_conv_(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """silu of a convolution of each channel over time; `conv` keeps the last W - 1 inputs."""
    y_TC = torch.empty_like(x_TC)
    for rows, slot, is_first in requests_of(step):
        y_Cn = _one_request_(x_TC[rows], weight_CW, bias_C, conv_PCW, slot, is_first)
        y_TC[rows] = F.silu(y_Cn).T.to(y_TC.dtype)
    return y_TC


def short_conv_(
    mixed_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """c * convolution of (b * x), each channel over time; `mixed` is b, c and x side by side.

    `conv` keeps the last W - 1 products b * x.
    """
    b_TC, c_TC, x_TC = mixed_TC.chunk(3, 1)
    product_TC, y_TC = b_TC * x_TC, torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    for rows, slot, is_first in requests_of(step):
        y_Cn = _one_request_(product_TC[rows], weight_CW, bias_C, conv_PCW, slot, is_first)
        y_TC[rows] = c_TC[rows] * y_Cn.T.to(y_TC.dtype)
    return y_TC


def _one_request_(
    x_nC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    conv_PCW: torch.Tensor,
    slot: int,
    is_first: bool,
) -> torch.Tensor:
    """Convolution [C, n] of one request's rows, in float32, or wider where x is."""
    wide = torch.promote_types(x_nC.dtype, torch.float32)
    before_CW = conv_PCW[slot] if not is_first else torch.zeros_like(conv_PCW[0])
    seen_CL = torch.cat([before_CW, x_nC.T.to(conv_PCW.dtype)], 1)
    windows_CnW = seen_CL.unfold(1, weight_CW.shape[1], 1).to(wide)
    y_Cn = (windows_CnW * weight_CW[:, None].to(wide)).sum(-1)
    if slot >= 0:
        conv_PCW[slot] = seen_CL[:, seen_CL.shape[1] - before_CW.shape[1] :]
    return y_Cn if bias_C is None else y_Cn + bias_C[:, None].to(wide)
