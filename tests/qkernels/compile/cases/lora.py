"""Calls of the operations of adapters."""

import functools

import torch

from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.weights import TABLE_COLUMNS, LoraWeights
from qkernels.operands.split_k import Consumer, SplitKPartials
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import BF16, SM90, Case
from tests.qkernels.compile.cases.weights import prepared

ADAPTED = (  # scheme, M, linear, outputs of its adjacent projections, K, consumer
    ("w4a16-sym", 1, "qkv", (4096, 1024, 1024), 4096, "rope"),
    ("w4a16-asym", 2, "down", (4096,), 14336, "norm"),
    ("w4a16-sym", 4, "gate_up", (14336, 14336), 4096, None),
    ("w4a16-sym", 2, "delta net", (2048, 2048, 4096, 4096), 2048, None),
    ("w8a16-sym", 3, "o", (4096,), 4096, "norm"),
    ("w4a16-sym", 8, "qkv", (4096, 1024, 1024), 4096, "rope"),
    ("w4a16-asym", 16, "down", (4096,), 14336, "norm"),
    ("w4a16-sym", 32, "gate_up", (14336, 14336), 4096, None),
    ("w4a16-sym", 16, "delta net", (2048, 2048, 4096, 4096), 2048, None),
    ("w4a16-sym", 32, "o", (4096,), 4096, "norm"),
    ("w4a16-sym", 64, "qkv", (4096, 1024, 1024), 4096, "rope"),
    ("w4a16-asym", 64, "gate_up", (14336, 14336), 4096, None),
)


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


def adapted(scheme: str, M: int, sizes: tuple[int, ...], K: int, consumer: Consumer | None) -> None:
    adapted_product(prepared(scheme, (sum(sizes), K), BF16), M, sizes, consumer)


LORA: dict[str, Case] = {
    "lora qkv T=1": Case(run=lambda: lora(1, 4096, (4096, 1024, 1024)), quick=SM90, product="mma"),
    "lora qkv fixed order T=1": Case(
        run=lambda: lora(1, 4096, (4096, 1024, 1024), kernel="fixed_order"), product="mma"
    ),
    "lora gate_up fixed order T=2048": Case(
        run=lambda: lora(2048, 4096, (14336, 14336), rank=64, kernel="fixed_order"), product="mma"
    ),
    "lora down T=32": Case(run=lambda: lora(32, 14336, (4096,), slots=64, parts=4), product="mma"),
    "lora gate_up T=2048": Case(
        run=lambda: lora(2048, 4096, (14336, 14336), rank=64), product="wgmma"
    ),
    **{
        f"{scheme} of adapters M={M}{' split' if consumer else ''} {name}": Case(
            run=functools.partial(adapted, scheme, M, sizes, K, consumer),
            quick=SM90 if M in (1, 16) else (),
            product="mma" if M <= 4 else "wgmma",
        )
        for scheme, M, name, sizes, K, consumer in ADAPTED
    },
}
