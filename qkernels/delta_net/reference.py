"""The gated delta net in plain torch, one request and one token after the other: the definition.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), with the norms of
Qwen3-Next. Legend: T tokens of a step, C channels of queries, keys and values, P slots, J key
heads, H value heads, K key dim, V value dim.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import StateStep, requests_of

L2_EPS = 1e-6  # of the norms of queries and keys


def delta_rule_(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHKV: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """Outputs [T, H, V]: what each token reads from its request's state after its own update.

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q. The arithmetic is in the state's
    dtype.
    """
    q_THK, k_THK, v_THV, g_TH, beta_TH = split_mixed(
        mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, memory_PHKV
    )
    o_THV = torch.empty_like(v_THV)
    for rows, slot, is_first in requests_of(step):
        S_HKV = memory_PHKV[slot].clone() if not is_first else torch.zeros_like(memory_PHKV[0])
        for t in range(rows.start, rows.stop):
            S_HKV *= g_TH[t].exp()[:, None, None]
            known_HV = torch.einsum("hkv,hk->hv", S_HKV, k_THK[t])
            written_HV = beta_TH[t][:, None] * (v_THV[t] - known_HV)
            S_HKV += k_THK[t][:, :, None] * written_HV[:, None]
            o_THV[t] = torch.einsum("hkv,hk->hv", S_HKV, q_THK[t])
        if slot >= 0:
            memory_PHKV[slot] = S_HKV
    return o_THV.to(mixed_TC.dtype)


def gated_rms_norm(
    x_THV: torch.Tensor, z_THV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    """x / rms(x) * weight * silu(z) of each head; the factor silu(z) is float32."""
    wide = x_THV.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight_V * normed.to(x_THV.dtype)
    return (normed * F.silu(z_THV.float())).to(x_THV.dtype)


def split_mixed(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    memory_PHKV: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """q, k [T, H, K], v [T, H, V], g and beta [T, H] in the state's dtype.

    Queries and keys have length 1, apart from the scale K^-0.5 of queries. Each key head is
    repeated for its value heads, which are adjacent.
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
    g_TH = -a_log_H.to(wide).exp() * F.softplus(a_TH.to(wide) + dt_bias_H.to(wide))
    return q * K**-0.5, k, v_THV, g_TH, b_TH.to(wide).sigmoid()
