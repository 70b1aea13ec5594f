"""Calls of mixtures of experts with adapters. All experts have the weights of two."""

import dataclasses
import functools

import torch

from qkernels import ops
from qkernels.lora.weights import TABLE_COLUMNS
from qkernels.moe.adapted.weights import ExpertAdapters, ExpertLora
from qkernels.moe.routing import Routes
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import SM80, SM90, Case
from tests.qkernels.compile.cases.experts import (
    GEMMA_4,
    GPT_OSS,
    NEMOTRON_3_NANO,
    QWEN3_30B,
    Shape,
    prepared_experts,
)


def adapted(
    M: int, shape: Shape, scheme: str | None, *, rank: int, slots: int, partial: bool = False
) -> None:
    """`partial`: other ranks have experts."""
    hidden, inner, E, k = shape
    prepared = prepared_experts(scheme, shape)
    if partial:
        problem = dataclasses.replace(prepared.problem, routed_experts=E)
        prepared = dataclasses.replace(prepared, problem=problem)
    routes = Routes(torch.zeros(M, k, dtype=torch.int32), torch.ones(M, k))
    S = 2 if prepared.glu.gated else 1
    adapters = ExpertAdapters(
        gate_up=_lora(hidden, (inner,) * S, rank, slots),
        down=_lora(inner, (hidden,), rank, slots),
        slots_M=torch.zeros(M, dtype=torch.int32),
    )
    ops.experts(empty(M, hidden), routes, prepared, adapters=adapters)


def _lora(K: int, sizes: tuple[int, ...], rank: int, slots: int) -> ExpertLora:
    return ExpertLora(
        a_LRESK=empty(slots, rank, 2, len(sizes), K),
        b_LREN=empty(slots, rank, 2, sum(sizes)),
        ranks_LS=torch.zeros(slots, TABLE_COLUMNS, dtype=torch.int32),
        scales_LS=torch.zeros(slots, TABLE_COLUMNS),
        sizes=sizes,
    )


ADAPTED_EXPERTS: dict[str, Case] = {
    f"experts with adapters, {scheme} M={M}{' of ranks' if partial else ''}": Case(
        run=functools.partial(adapted, M, shape, scheme, rank=rank, slots=slots, partial=partial),
        quick=quick,
    )
    for scheme, M, shape, rank, slots, partial, quick in (
        ("w4a16-sym", 1, QWEN3_30B, 16, 4, False, (*SM80, *SM90)),
        ("w4a16-sym", 17, QWEN3_30B, 64, 40, True, ()),
        ("w4a16-mxfp4", 8, GPT_OSS, 8, 4, False, SM90),
        (None, 512, GEMMA_4, 32, 4, False, (*SM80, *SM90)),
        (None, 64, NEMOTRON_3_NANO, 16, 8, True, ()),
        ("w8a8", 128, QWEN3_30B, 16, 4, False, ()),
    )
}
