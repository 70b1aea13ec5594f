"""Plain torch reference of Mamba-2, one request and one token after the other.

Dao and Gu, "Transformers are SSMs" (2024). Legend: see ops.py.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import StateStep, keep_recent_, recent_rows, requests_of


def selective_scan_(
    mixed_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    skip_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHND: torch.Tensor,
    dt_limits: tuple[float, float],
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of ops.selective_scan_.

    S = exp(-exp(a_log) dt) S + dt B x^T;  y = S^T C + skip x, computed in the state's dtype.
    """
    numbers = a_log_H, dt_bias_H, memory_PHND, dt_limits
    x_THD, b_THN, c_THN, sizes_TH, g_TH = split_mixed(mixed_TC, dt_TH, *numbers)
    y_THD = x_THD * skip_H.to(x_THD.dtype)[:, None]
    for own in requests_of(step):
        rows, slot = own.rows, own.slot
        S_HND = torch.zeros_like(memory_PHND[0]) if own.is_first else memory_PHND[slot].clone()
        if own.lacking:
            inputs_nI = recent_rows(recent_PNI[slot], own.start, own.lacking)
            for x, b, size, g in zip(*split_recent(inputs_nI, *numbers), strict=True):
                S_HND = _updated(S_HND, x, b, size, g)
        if own.is_verify(recent_PNI) and slot >= 0:
            memory_PHND[slot] = S_HND
            inputs = row_inputs(mixed_TC, dt_TH, rows, x_THD[0].numel())
            keep_recent_(recent_PNI[slot], own.start, *inputs)
        for t in range(rows.start, rows.stop):
            S_HND = _updated(S_HND, x_THD[t], b_THN[t], sizes_TH[t], g_TH[t])
            y_THD[t] += torch.einsum("hnd,hn->hd", S_HND, c_THN[t])
        if slot >= 0 and not own.is_verify(recent_PNI):
            memory_PHND[slot] = S_HND
    return y_THD.to(mixed_TC.dtype)


def _updated(
    S_HND: torch.Tensor,
    x_HD: torch.Tensor,
    b_HN: torch.Tensor,
    size_H: torch.Tensor,
    g_H: torch.Tensor,
) -> torch.Tensor:
    """Return the state after a token."""
    written_HND = b_HN[:, :, None] * (size_H[:, None] * x_HD)[:, None]
    return g_H.exp()[:, None, None] * S_HND + written_HND


def gated_group_norm(
    x_TC: torch.Tensor,
    z_TC: torch.Tensor,
    weight_C: torch.Tensor | None,
    groups: int,
    eps: float,
    norm_first: bool,
) -> torch.Tensor:
    """Reference of ops.gated_group_norm."""
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
    """Return x [T, H, D], B and C [T, H, N], dt and the log decay [T, H] in the state's dtype.

    B and C of a group are repeated for its heads, which are adjacent.
    """
    _, H, N, D = memory_PHND.shape
    wide = memory_PHND.dtype
    of_groups = (mixed_TC.shape[1] - H * D) // 2
    x, b, c = mixed_TC.to(wide).split([H * D, of_groups, of_groups], 1)
    b, c = (each.unflatten(1, (-1, N)).repeat_interleave(H * N // of_groups, 1) for each in (b, c))
    dt_TH = F.softplus(dt_TH.to(wide) + dt_bias_H.to(wide)).clamp(*dt_limits)
    return x.unflatten(1, (H, D)), b, c, dt_TH, -a_log_H.to(wide).exp() * dt_TH


def recent_width(inner: int, groups: int, heads: int) -> int:
    """Return I of `recent_PNI`: the inputs of a row that a later step may apply.

    `groups` is G N.
    """
    return inner + groups + heads


def row_inputs(
    mixed_TC: torch.Tensor, dt_TH: torch.Tensor, rows: slice, inner: int
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of rows that a later step may apply: x with B, and dt. `inner` is H D."""
    of_groups = (mixed_TC.shape[1] - inner) // 2
    return mixed_TC[rows, : inner + of_groups], dt_TH[rows]


def split_recent(
    inputs_nI: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHND: torch.Tensor,
    dt_limits: tuple[float, float],
) -> tuple[torch.Tensor, ...]:
    """Return x [n, H, D], B [n, H, N], dt and the log decay [n, H] of kept row inputs."""
    _, H, _, D = memory_PHND.shape
    numbers = a_log_H, dt_bias_H, memory_PHND, dt_limits
    x, b, _, sizes, g = split_mixed(*rows_of_inputs(inputs_nI, H, H * D), *numbers)
    return x, b, sizes, g


def rows_of_inputs(
    inputs_nI: torch.Tensor, heads: int, inner: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mixed and dt of kept row inputs; B also fills the columns of C."""
    mixed_nC, dt_nH = inputs_nI.split([inputs_nI.shape[1] - heads, heads], 1)
    return torch.cat([mixed_nC, mixed_nC[:, inner:]], 1), dt_nH
