"""Plain torch reference of the LoRA term of experts, in float32. Legend: see weights.py."""

import torch

from qkernels.moe.adapted.weights import ExpertLora


def add_term(
    y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, expert: int, lora: ExpertLora
) -> torch.Tensor:
    """Return y plus scale * B (A x) of one expert, for the rows that have an adapter.

    `slots`: adapter slot of each row, or -1.
    """
    out = y.clone()
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows, start = (slots == slot).nonzero()[:, 0], 0
        ranks, scales = lora.ranks_LS[slot].tolist(), lora.scales_LS[slot].tolist()
        for s, size in enumerate(lora.sizes):
            if rank := ranks[s]:
                a_rK = lora.a_LRESK[slot, :rank, expert, s].float()
                b_rN = lora.b_LREN[slot, :rank, expert, start : start + size].float()
                delta = scales[s] * ((x[rows].float() @ a_rK.T) @ b_rN)
                columns = out[:, start : start + size]
                columns[rows] = (columns[rows].float() + delta).to(out.dtype)
            start += size
    return out
