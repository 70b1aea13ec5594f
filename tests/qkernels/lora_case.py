"""Adapters of one linear with ranks of their own, as the device holds them, and a plain product."""

import torch

from qkernels.lora.weights import TABLE_COLUMNS, LoraWeights


def lora_weights(ranks, K, sizes, dtype, device, *, max_rank, seed=0, poison=True):
    """`ranks`: of each slot one for each of `sizes`. What no rank reaches holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    L, S, N = len(ranks), len(sizes), sum(sizes)
    # stored as on the device: of each rank A's rows, then B's column, and a gap
    piece = S * K + N + 16
    memory = torch.randn(L, max_rank, piece, generator=generator) / K**0.5
    table = torch.zeros(L, TABLE_COLUMNS, dtype=torch.int32)
    scales = torch.zeros(L, TABLE_COLUMNS)
    for slot, of_slices in enumerate(ranks):
        column = S * K
        for s, rank in enumerate(of_slices):
            table[slot, s], scales[slot, s] = rank, 0.5 + slot + s
            if poison:
                memory[slot, rank:, s * K : (s + 1) * K] = float("nan")
                memory[slot, rank:, column : column + sizes[s]] = float("nan")
            column += sizes[s]
    memory = memory.to(device, dtype)
    return LoraWeights(
        a_LRSK=memory.as_strided((L, max_rank, S, K), (max_rank * piece, piece, K, 1)),
        b_LRN=memory.as_strided((L, max_rank, N), (max_rank * piece, piece, 1), S * K),
        ranks_LS=table.to(device),
        scales_LS=scales.to(device),
        sizes=tuple(sizes),
    )


def adapted(x_TK, y_TN, slots, weights):
    """y plus each row's scale * B A x, in float64."""
    out = y_TN.double().clone()
    for t, slot in enumerate(slots):
        start = 0
        for s, size in enumerate(weights.sizes):
            rank = int(weights.ranks_LS[slot, s]) if slot >= 0 else 0
            a = weights.a_LRSK[slot, :rank, s].double()
            b = weights.b_LRN[slot, :rank, start : start + size].double()
            delta = float(weights.scales_LS[slot, s]) * (a @ x_TK[t].double()) @ b
            out[t, start : start + size] += delta
            start += size
    return out
