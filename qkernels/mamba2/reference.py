"""Mamba-2 in plain torch, one request and one token after the other: the definition.

Dao and Gu, "Transformers are SSMs" (2024). Legend: T tokens of a step, C channels of x, B and C, P
slots, G groups, H heads, N state size, D head dim.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import StateStep, requests_of


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
    """Outputs [T, H, D]: what each token reads from its request's state after its own update.

    S = exp(-exp(a_log) dt) S + dt B x^T;  y = S^T C + skip x. The arithmetic is in the state's
    dtype.
    """
    x_THD, b_THN, c_THN, dt_TH, g_TH = split_mixed(
        mixed_TC, dt_TH, a_log_H, dt_bias_H, memory_PHND, dt_limits
    )
    y_THD = x_THD * skip_H.to(x_THD.dtype)[:, None]
    for rows, slot, is_first in requests_of(step):
        S_HND = torch.zeros_like(memory_PHND[0]) if is_first else memory_PHND[slot].clone()
        for t in range(rows.start, rows.stop):
            written_HND = b_THN[t][:, :, None] * (dt_TH[t][:, None] * x_THD[t])[:, None]
            S_HND = g_TH[t].exp()[:, None, None] * S_HND + written_HND
            y_THD[t] += torch.einsum("hnd,hn->hd", S_HND, c_THN[t])
        if slot >= 0:
            memory_PHND[slot] = S_HND
    return y_THD.to(mixed_TC.dtype)


def gated_group_norm(
    x_TC: torch.Tensor,
    z_TC: torch.Tensor,
    weight_C: torch.Tensor | None,
    groups: int,
    eps: float,
    norm_first: bool,
) -> torch.Tensor:
    """x * silu(z) with an RMS norm of each group before or after; without a weight, no norm."""
    wide, gate = x_TC.float(), F.silu(z_TC.float())
    if weight_C is None:
        return (wide * gate).to(x_TC.dtype)
    wide = wide if norm_first else wide * gate
    by_group = wide.unflatten(1, (groups, -1))
    by_group = by_group * torch.rsqrt(by_group.pow(2).mean(-1, keepdim=True) + eps)
    wide = weight_C.float() * by_group.flatten(1)
    return (wide * gate if norm_first else wide).to(x_TC.dtype)


def split_mixed(
    mixed_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHND: torch.Tensor,
    dt_limits: tuple[float, float],
) -> tuple[torch.Tensor, ...]:
    """x [T, H, D], B and C [T, H, N], dt and the log of the decay [T, H] in the state's dtype.

    B and C of a group are repeated for its heads, which are adjacent.
    """
    _, H, N, D = memory_PHND.shape
    wide = memory_PHND.dtype
    of_groups = (mixed_TC.shape[1] - H * D) // 2
    x, b, c = mixed_TC.to(wide).split([H * D, of_groups, of_groups], 1)
    b, c = (each.unflatten(1, (-1, N)).repeat_interleave(H * N // of_groups, 1) for each in (b, c))
    dt_TH = F.softplus(dt_TH.to(wide) + dt_bias_H.to(wide)).clamp(*dt_limits)
    return x.unflatten(1, (H, D)), b, c, dt_TH, -a_log_H.to(wide).exp() * dt_TH
