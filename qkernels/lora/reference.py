"""Plain torch references of the LoRA operations, in float32. Legend: see weights.py."""

import torch
from torch.nn import functional

from qkernels.lora.config import whole_blocks
from qkernels.lora.weights import LoraWeights
from qkernels.operands.split_k import LinearOutput, SplitKPartials


def lora_shrink(x_TK: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
    """Return A x for each row's adapter, float32 [T, S, R]; zeros for rows without an adapter."""
    S, R = weights.num_slices, weights.max_rank
    h_TSR = torch.zeros(x_TK.shape[0], S, R, dtype=torch.float32, device=x_TK.device)
    for slot, rows in _adapters(slots_T):
        x = x_TK[rows].float()
        for s, rank in enumerate(weights.ranks_LS[slot, :S].tolist()):
            a_rK = weights.a_LRSK[slot, :rank, s].float()
            h_TSR[rows, s, :rank] = x @ a_rK.T
    return h_TSR


def lora_shrink_parts(
    x_TK: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights
) -> torch.Tensor:
    """Return lora_shrink as one partial sum, with ranks padded to whole blocks."""
    h_TSR = lora_shrink(x_TK, slots_T, weights)
    return functional.pad(h_TSR, (0, whole_blocks(weights.max_rank) - weights.max_rank))[None]


def lora_expand_(
    y_TN: LinearOutput, h_TSR: torch.Tensor, slots_T: torch.Tensor, weights: LoraWeights
) -> None:
    """Add scale * B h to the rows of y that have an adapter."""
    out_TN = y_TN.parts[0] if isinstance(y_TN, SplitKPartials) else y_TN
    for slot, rows in _adapters(slots_T):
        start = 0
        ranks = weights.ranks_LS[slot].tolist()
        scales = weights.scales_LS[slot].tolist()
        for s, size in enumerate(weights.sizes):
            if rank := ranks[s]:
                b_rN = weights.b_LRN[slot, :rank, start : start + size].float()
                delta = scales[s] * (h_TSR[rows, s, :rank] @ b_rN)
                columns = out_TN[:, start : start + size]
                columns[rows] = (columns[rows].float() + delta).to(out_TN.dtype)
            start += size


def _adapters(slots_T: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return the slots in use, each with its row indices."""
    return [
        (slot, (slots_T == slot).nonzero()[:, 0]) for slot in slots_T.unique().tolist() if slot >= 0
    ]
