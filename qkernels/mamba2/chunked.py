"""Mamba-2 in plain torch, fast enough for a CPU: prompts in chunks, decode rows together.

Within a chunk the outputs are matrix products (the dual form of Dao and Gu, 2024). Legend: see
ops.py; L tokens of a chunk, B requests of one token.
"""

import torch

from qkernels.causal_conv.state import SplitStep, StateStep, keep_recent_, recent_rows
from qkernels.mamba2 import reference

CHUNK = 64  # tokens


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
    """Implement ops.selective_scan_."""
    numbers = a_log_H, dt_bias_H, memory_PHND, dt_limits
    x, b, c, dt, g = reference.split_mixed(mixed_TC, dt_TH, *numbers)
    y_THD = x * skip_H.to(x.dtype)[:, None]
    split = SplitStep.of(step, mixed_TC.device)
    if len(rows_B := split.rows_B):
        written = b[rows_B, :, :, None] * (dt[rows_B, :, None] * x[rows_B])[:, :, None]
        S_BHND = split.gathered(memory_PHND) * g[rows_B].exp()[:, :, None, None] + written
        y_THD[rows_B] += (S_BHND * c[rows_B, :, :, None]).sum(2)
        split.scatter_(memory_PHND, S_BHND)
    for own in split.others:
        rows, slot = own.rows, own.slot
        S_HND = torch.zeros_like(memory_PHND[0]) if own.is_first else memory_PHND[slot].clone()
        if own.lacking:
            inputs_nI = recent_rows(recent_PNI[slot], own.start, own.lacking)
            x_n, b_n, dt_n, g_n = (
                each.transpose(0, 1) for each in reference.split_recent(inputs_nI, *numbers)
            )
            _, S_HND = _chunk(x_n, b_n, b_n, dt_n, g_n, S_HND)
        is_verify = own.is_verify(recent_PNI)
        if is_verify and slot >= 0:
            memory_PHND[slot] = S_HND
            inputs = reference.row_inputs(mixed_TC, dt_TH, rows, x[0].numel())
            keep_recent_(recent_PNI[slot], own.start, *inputs)
        for first in range(rows.start, rows.stop, CHUNK):
            part = slice(first, min(first + CHUNK, rows.stop))
            of_heads = (each[part].transpose(0, 1) for each in (x, b, c, dt, g))
            y_HLD, S_HND = _chunk(*of_heads, S_HND)
            y_THD[part] += y_HLD.transpose(0, 1)
        if slot >= 0 and not is_verify:
            memory_PHND[slot] = S_HND
    return y_THD.to(mixed_TC.dtype)


def _chunk(
    x_HLD: torch.Tensor,
    b_HLN: torch.Tensor,
    c_HLN: torch.Tensor,
    dt_HL: torch.Tensor,
    g_HL: torch.Tensor,
    S_HND: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [H, L, D] of one chunk and the state after it."""
    L = x_HLD.shape[1]
    total_HL = g_HL.cumsum(-1)  # log of the decay since the start of the chunk
    between = total_HL[:, :, None] - total_HL[:, None, :]
    causal_LL = torch.ones(L, L, dtype=torch.bool, device=g_HL.device).tril()
    left_HLL = between.masked_fill(~causal_LL, -torch.inf).exp()
    written_HLD = dt_HL[..., None] * x_HLD
    y_HLD = ((c_HLN @ b_HLN.mT) * left_HLL) @ written_HLD
    y_HLD = y_HLD + total_HL.exp()[..., None] * (c_HLN @ S_HND)
    b_end = b_HLN * (total_HL[:, -1:] - total_HL).exp()[..., None]
    return y_HLD, total_HL[:, -1].exp()[:, None, None] * S_HND + b_end.mT @ written_HLD
