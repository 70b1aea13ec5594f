"""Plain torch reference of the gated delta net, one request and one token after the other.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), with the norms of
Qwen3-Next; and Kimi Delta Attention ("Kimi Linear", arXiv 2510.26692), in which each key channel
has its own decay. Legend: see ops.py; X decays of a head (1 or K).
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import StateStep, keep_recent_, recent_rows, requests_of

L2_EPS = 1e-6  # epsilon of the norms of queries and keys


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TA: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_A: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
    recent_PNI: torch.Tensor | None = None,
    write_factor: float = 1.0,
    decay_bound: float = 0.0,
) -> torch.Tensor:
    """Reference of ops.delta_rule_.

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q, computed in the state's dtype.
    """
    numbers = a_log_H, dt_bias_A, memory_PHKV, write_factor, decay_bound
    q_THK, k_THK, v_THV, g_THX, beta_TH = split_mixed(mixed_TC, b_TH, a_TA, *numbers)
    o_THV = torch.empty_like(v_THV)
    for own in requests_of(step):
        rows, slot = own.rows, own.slot
        S_HKV = torch.zeros_like(memory_PHKV[0]) if own.is_first else memory_PHKV[slot].clone()
        if own.lacking:
            inputs_nI = recent_rows(recent_PNI[slot], own.start, own.lacking)
            for k, v, g, beta in zip(*split_recent(inputs_nI, *numbers), strict=True):
                S_HKV = _updated(S_HKV, k, v, g, beta)
        if own.is_verify(recent_PNI) and slot >= 0:
            memory_PHKV[slot] = S_HKV
            inputs = row_inputs(mixed_TC, b_TH, a_TA, rows, v_THV[0].numel())
            keep_recent_(recent_PNI[slot], own.start, *inputs)
        for t in range(rows.start, rows.stop):
            S_HKV = _updated(S_HKV, k_THK[t], v_THV[t], g_THX[t], beta_TH[t])
            o_THV[t] = torch.einsum("hkv,hk->hv", S_HKV, q_THK[t])
        if slot >= 0 and not own.is_verify(recent_PNI):
            memory_PHKV[slot] = S_HKV
    return o_THV.to(mixed_TC.dtype)


def _updated(
    S_HKV: torch.Tensor,
    k_HK: torch.Tensor,
    v_HV: torch.Tensor,
    g_HX: torch.Tensor,
    beta_H: torch.Tensor,
) -> torch.Tensor:
    """Return the state after a token."""
    S_HKV = S_HKV * g_HX.exp()[:, :, None]
    known_HV = torch.einsum("hkv,hk->hv", S_HKV, k_HK)
    written_HV = beta_H[:, None] * (v_HV - known_HV)
    return S_HKV + k_HK[:, :, None] * written_HV[:, None]


def gated_rms_norm(
    x_THV: torch.Tensor,
    z_THV: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Return x / rms(x) * weight * silu(z) of each head; the factor silu(z) is float32.

    With `sigmoid`, the factor is sigmoid(z), and only the result is rounded.
    """
    wide = x_THV.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if sigmoid:
        return (weight_V.float() * normed * z_THV.float().sigmoid()).to(x_THV.dtype)
    normed = weight_V * normed.to(x_THV.dtype)
    return (normed * F.silu(z_THV.float())).to(x_THV.dtype)


def split_mixed(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TA: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_A: torch.Tensor,
    memory_PHKV: torch.Tensor,
    write_factor: float = 1.0,
    decay_bound: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Return q, k [T, H, K], v [T, H, V], g [T, H, X] and beta [T, H] in the state's dtype.

    Queries and keys have length 1, apart from the factor K^-0.5 of queries. Each key head is
    repeated for its value heads, which are adjacent. beta is write_factor sigmoid(b). g, the log of
    the decay, is decay_bound sigmoid(exp(a_log) (a + dt_bias)) if decay_bound is below 0.
    """
    _, H, K, V = memory_PHKV.shape
    wide = memory_PHKV.dtype
    keys = (mixed_TC.shape[1] - H * V) // 2
    q, k, v_THV = (
        part.to(wide).unflatten(1, (-1, size))
        for part, size in zip(mixed_TC.split([keys, keys, H * V], 1), (K, K, V), strict=True)
    )
    q, k = (
        (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(
            H // x.shape[1], 1
        )
        for x in (q, k)
    )
    a_THX = (a_TA.to(wide) + dt_bias_A.to(wide)).unflatten(1, (H, -1))
    rates_H1 = a_log_H.to(wide).exp()[:, None]
    bounded = decay_bound < 0
    g_THX = decay_bound * (rates_H1 * a_THX).sigmoid() if bounded else -rates_H1 * F.softplus(a_THX)
    beta_TH = write_factor * b_TH.to(wide).sigmoid()
    return q * K**-0.5, k, v_THV, g_THX, beta_TH


def recent_width(keys: int, values: int, heads: int, decays: int | None = None) -> int:
    """Return I of `recent_PNI`: the inputs of a row that a later step may apply.

    `decays` is A; None: H.
    """
    return keys + values + heads + (decays or heads)


def row_inputs(
    mixed_TC: torch.Tensor, b_TH: torch.Tensor, a_TA: torch.Tensor, rows: slice, values: int
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of rows that a later step may apply: keys with values, b and a.

    `values` is H V.
    """
    keys = (mixed_TC.shape[1] - values) // 2
    return mixed_TC[rows, keys:], b_TH[rows], a_TA[rows]


def split_recent(
    inputs_nI: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_A: torch.Tensor,
    memory_PHKV: torch.Tensor,
    write_factor: float = 1.0,
    decay_bound: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Return k [n, H, K], v [n, H, V], g [n, H, X] and beta [n, H] of kept row inputs."""
    H, V = memory_PHKV.shape[1], memory_PHKV.shape[3]
    rows = rows_of_inputs(inputs_nI, H, H * V, len(dt_bias_A))
    return split_mixed(*rows, a_log_H, dt_bias_A, memory_PHKV, write_factor, decay_bound)[1:]


def rows_of_inputs(
    inputs_nI: torch.Tensor, heads: int, values: int, decays: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mixed, b and a of kept row inputs; the keys also fill the columns of the queries."""
    keys = inputs_nI.shape[1] - values - heads - decays
    mixed_nC, b_nH, a_nA = inputs_nI.split([keys + values, heads, decays], 1)
    return torch.cat([mixed_nC[:, :keys], mixed_nC], 1), b_nH, a_nA
