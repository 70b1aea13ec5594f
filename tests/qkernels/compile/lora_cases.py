"""Calls of the adapters' operations, for cases.py."""

import torch

from qkernels import ops
from qkernels.lora.weights import TABLE_COLUMNS, LoraWeights
from qkernels.operands.split_k import SplitKPartials
from tests.qkernels.compile.cards import empty


def lora(
    T: int, K: int, sizes: tuple[int, ...], *, rank: int = 16, slots: int = 8, parts: int = 0
) -> None:
    """Both kernels of a linear; `parts` of K, which the next operation adds, where there are."""
    S, N = len(sizes), sum(sizes)
    weights = LoraWeights(
        a_LRSK=empty(slots, rank, S, K),
        b_LRN=empty(slots, rank, N),
        ranks_LS=torch.zeros(slots, TABLE_COLUMNS, dtype=torch.int32),
        scales_LS=torch.zeros(slots, TABLE_COLUMNS),
        sizes=sizes,
    )
    of_rows = torch.zeros(T, dtype=torch.int32)
    y = empty(T, N)
    if parts:
        y = SplitKPartials(parts=empty(parts, T, N, dtype=torch.float32), dtype=torch.bfloat16)
    h = ops.lora_shrink(empty(T, K), of_rows, weights)
    ops.lora_expand_(y, h, of_rows, weights)
