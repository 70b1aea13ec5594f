"""Calls of the adapters' operations, for cases.py."""

import torch

from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.weights import TABLE_COLUMNS, LoraWeights
from qkernels.operands.split_k import Consumer, SplitKPartials
from tests.qkernels.compile.cards import empty


def lora(
    T: int,
    K: int,
    sizes: tuple[int, ...],
    *,
    rank: int = 16,
    slots: int = 8,
    parts: int = 0,
    kernel: str | None = None,
) -> None:
    """Both kernels of a linear; `parts` of K, which the next operation adds, where there are."""
    N, weights = sum(sizes), _weights(K, sizes, rank, slots)
    of_rows = torch.zeros(T, dtype=torch.int32)
    y = empty(T, N)
    if parts:
        y = SplitKPartials(parts=empty(parts, T, N, dtype=torch.float32), dtype=torch.bfloat16)
    h = ops.lora_shrink(empty(T, K), of_rows, weights, kernel)
    ops.lora_expand_(y, h, of_rows, weights, kernel)


def adapted_product(
    weight: PreparedWeight,
    T: int,
    sizes: tuple[int, ...],
    consumer: Consumer | None = None,
    *,
    rank: int = 16,
    slots: int = 8,
) -> None:
    """Shrink, the product, and expand where the card's product does not add the rest."""
    plan = ops.plan_linear(weight, T, consumer, adapted=sizes)
    x = empty(T, weight.in_features)
    of_rows = torch.zeros(T, dtype=torch.int32)
    weights = _weights(weight.in_features, sizes, rank, slots)
    taken = x if plan.input is None else ops.to_limbs(x, plan.input)
    if plan.adds_adapters:
        ops.linear(taken, weight, None, plan, ops.lora_term(x, of_rows, weights))
        return
    h = ops.lora_shrink(x, of_rows, weights)
    ops.lora_expand_(ops.linear(taken, weight, None, plan), h, of_rows, weights)


def _weights(K: int, sizes: tuple[int, ...], rank: int, slots: int) -> LoraWeights:
    return LoraWeights(
        a_LRSK=empty(slots, rank, len(sizes), K),
        b_LRN=empty(slots, rank, sum(sizes)),
        ranks_LS=torch.zeros(slots, TABLE_COLUMNS, dtype=torch.int32),
        scales_LS=torch.zeros(slots, TABLE_COLUMNS),
        sizes=sizes,
    )
