"""Gated delta net in plain torch, fast enough for a CPU: prompts in chunks, decode rows together.

Within a chunk the recurrence is a triangular system (the UT transform of Yang et al., 2024), so a
prompt takes matrix products instead of a loop over its tokens. Legend: see reference.py; N chunks
of L tokens, B requests of one token.
"""

import torch
import torch.nn.functional as F

from qkernels.causal_conv.state import SplitStep, StateStep, keep_recent_, recent_rows
from qkernels.delta_net import reference

CHUNK = 64  # tokens
# Tokens per chunk if each key channel has its own decay: the decay between two tokens then has one
# number per channel, and short chunks limit that memory.
CHUNK_OF_CHANNELS = 16


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
    """Implement ops.delta_rule_ like reference.delta_rule_."""
    numbers = a_log_H, dt_bias_A, memory_PHKV, write_factor, decay_bound
    q, k, v, g, beta = reference.split_mixed(mixed_TC, b_TH, a_TA, *numbers)
    o_THV = torch.empty_like(v)
    split = SplitStep.of(step, mixed_TC.device)
    if len(rows_B := split.rows_B):
        S_BHKV = split.gathered(memory_PHKV)
        S_BHKV = S_BHKV * g[rows_B].exp()[..., None]
        known_BHV = (S_BHKV * k[rows_B, :, :, None]).sum(2)
        written_BHV = beta[rows_B, :, None] * (v[rows_B] - known_BHV)
        S_BHKV = S_BHKV + k[rows_B, :, :, None] * written_BHV[:, :, None]
        o_THV[rows_B] = (S_BHKV * q[rows_B, :, :, None]).sum(2)
        split.scatter_(memory_PHKV, S_BHKV)
    for own in split.others:
        rows, slot = own.rows, own.slot
        S_HKV = torch.zeros_like(memory_PHKV[0]) if own.is_first else memory_PHKV[slot]
        if own.lacking:
            inputs_nI = recent_rows(recent_PNI[slot], own.start, own.lacking)
            k_n, v_n, g_n, beta_n = (
                x.transpose(0, 1) for x in reference.split_recent(inputs_nI, *numbers)
            )
            _, S_HKV = _chunks(k_n, k_n, v_n, g_n, beta_n, S_HKV)
        is_verify = own.is_verify(recent_PNI)
        if is_verify and slot >= 0:
            memory_PHKV[slot] = S_HKV
            inputs = reference.row_inputs(mixed_TC, b_TH, a_TA, rows, v[0].numel())
            keep_recent_(recent_PNI[slot], own.start, *inputs)
        of_heads = [x[rows].transpose(0, 1) for x in (q, k, v, g, beta)]
        o_HTV, S_HKV = _chunks(*of_heads, S_HKV)
        o_THV[rows] = o_HTV.transpose(0, 1)
        if slot >= 0 and not is_verify:
            memory_PHKV[slot] = S_HKV
    return o_THV.to(mixed_TC.dtype)


def _chunks(
    q_HTK: torch.Tensor,
    k_HTK: torch.Tensor,
    v_HTV: torch.Tensor,
    g_HTX: torch.Tensor,
    beta_HT: torch.Tensor,
    S_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one request's outputs [H, T, V] and its state after its last token."""
    T, by_channel = q_HTK.shape[1], g_HTX.shape[2] > 1
    L = min(CHUNK_OF_CHANNELS if by_channel else CHUNK, T)
    more = -T % L
    # padding tokens of zeros leave the state unchanged
    q, k, v, g = (
        F.pad(x, (0, 0, 0, more)).unflatten(1, (-1, L)) for x in (q_HTK, k_HTK, v_HTV, g_HTX)
    )
    beta = F.pad(beta_HT, (0, more)).unflatten(1, (-1, L))
    total_HNLX = g.cumsum(-2)  # log of the decay since the start of the chunk
    between = total_HNLX[..., :, None, :] - total_HNLX[..., None, :, :]
    causal_LL = torch.ones(L, L, dtype=torch.bool, device=g.device).tril()
    left_HNLLX = between.masked_fill(~causal_LL[..., None], -torch.inf).exp()
    bk = beta[..., None] * k

    def products(x_HNLK: torch.Tensor) -> torch.Tensor:
        """Return the products of rows with earlier keys, times the decay between them."""
        if by_channel:
            return (x_HNLK[..., :, None, :] * k[..., None, :, :] * left_HNLLX).sum(-1)
        return (x_HNLK @ k.mT) * left_HNLLX[..., 0]

    # (1 + A) written = beta (v - prediction of the state before the chunk)
    A_HNLL = products(bk)
    read_HNLK = bk * total_HNLX.exp()
    solved = torch.linalg.solve_triangular(
        A_HNLL, torch.cat([beta[..., None] * v, read_HNLK], -1), upper=False, unitriangular=True
    )
    own_HNLV, old_HNLK = solved.split([v.shape[-1], k.shape[-1]], -1)
    inner_HNLL = products(q)
    q_old = q * total_HNLX.exp()
    k_end = k * (total_HNLX[..., -1:, :] - total_HNLX).exp()
    left_end_HNX = total_HNLX[..., -1, :].exp()
    outputs = []
    for n in range(q.shape[1]):
        written_HLV = own_HNLV[:, n] - old_HNLK[:, n] @ S_HKV
        outputs.append(q_old[:, n] @ S_HKV + inner_HNLL[:, n] @ written_HLV)
        S_HKV = left_end_HNX[:, n, :, None] * S_HKV + k_end[:, n].mT @ written_HLV
    return torch.cat(outputs, 1)[:, :T], S_HKV
