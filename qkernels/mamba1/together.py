"""Mamba-1 in plain torch for a CPU: all decode rows together, prompts token by token.

Legend: see ops.py; B requests of one token.
"""

import torch

from qkernels.causal_conv.state import SplitStep, StateStep
from qkernels.mamba1 import reference


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
    numbers = rates_NI, skip_I, memory_P1NI
    split = SplitStep.of(step, x_TI.device)
    if split.others:
        return reference.channel_scan_(x_TI, dt_TI, b_TN, c_TN, *numbers, step, recent_PNI)
    y_TI = torch.zeros_like(x_TI)
    if len(rows_B := split.rows_B):
        wide = memory_P1NI.dtype
        x, dt, b, c = (each[rows_B].to(wide) for each in (x_TI, dt_TI, b_TN, c_TN))
        S_B1NI = split.gathered(memory_P1NI)
        S_B1NI = reference.updated(S_B1NI[:, 0], x, dt, b, rates_NI.to(wide))[:, None]
        read_BI = (S_B1NI[:, 0] * c[..., None]).sum(1)
        y_TI[rows_B] = (read_BI + skip_I.to(wide) * x).to(x_TI.dtype)
        split.scatter_(memory_P1NI, S_B1NI)
    return y_TI
