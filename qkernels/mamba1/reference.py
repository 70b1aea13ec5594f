"""Plain torch reference of Mamba-1, one request and one token after the other.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023). Legend: see
ops.py.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import StateStep, keep_recent_, recent_rows, requests_of


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
    """Reference of ops.channel_scan_.

    S = exp(rates dt) S + B (dt x)^T;  y = S^T C + skip x, computed in the state's dtype.
    """
    wide = memory_P1NI.dtype
    rates_NI, x, dt, b, c = (each.to(wide) for each in (rates_NI, x_TI, dt_TI, b_TN, c_TN))
    y_TI = x * skip_I.to(wide)
    for own in requests_of(step):
        slot = own.slot
        S_NI = torch.zeros_like(memory_P1NI[0, 0]) if own.is_first else memory_P1NI[slot, 0].clone()
        if own.lacking:
            inputs = recent_rows(recent_PNI[slot], own.start, own.lacking).to(wide)
            for old in zip(*rows_of_inputs(inputs, x.shape[1]), strict=True):
                S_NI = updated(S_NI, *old, rates_NI)
        is_verify = own.is_verify(recent_PNI)
        if is_verify and slot >= 0:
            memory_P1NI[slot, 0] = S_NI
            rows = own.rows
            keep_recent_(recent_PNI[slot], own.start, x_TI[rows], dt_TI[rows], b_TN[rows])
        for t in range(own.rows.start, own.rows.stop):
            S_NI = updated(S_NI, x[t], dt[t], b[t], rates_NI)
            y_TI[t] += (S_NI * c[t][:, None]).sum(0)
        if slot >= 0 and not is_verify:
            memory_P1NI[slot, 0] = S_NI
    return y_TI.to(x_TI.dtype)


def updated(
    S_BNI: torch.Tensor,
    x_BI: torch.Tensor,
    dt_BI: torch.Tensor,
    b_BN: torch.Tensor,
    rates_NI: torch.Tensor,
) -> torch.Tensor:
    """Return the states after a token. There may be any leading dimensions."""
    size_BI = F.softplus(dt_BI)
    written_BNI = b_BN[..., None] * (size_BI * x_BI)[..., None, :]
    return (rates_NI * size_BI[..., None, :]).exp() * S_BNI + written_BNI


def recent_width(channels: int, state: int) -> int:
    """Return the number of inputs of a row that a later step may apply: x, dt and B."""
    return 2 * channels + state


def rows_of_inputs(inputs_nI: torch.Tensor, channels: int) -> tuple[torch.Tensor, ...]:
    """Return x, dt and B of kept row inputs."""
    return inputs_nI.split([channels, channels, inputs_nI.shape[1] - 2 * channels], 1)
