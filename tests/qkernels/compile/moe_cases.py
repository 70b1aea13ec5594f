"""Calls of the operations of mixtures of experts, for cases.py. Two experts stand for all."""

import dataclasses
import functools

import torch

from formats.scheme import Scheme
from qkernels import ops
from qkernels.moe.experts import ExpertWeights, PreparedExperts
from qkernels.moe.routing import GEGLU, RELU2, SILU, Glu, Routes, Routing
from tests.qkernels.compile.cards import empty

MIXTRAL = (4096, 14336, 8, 2)  # hidden size, inner size, experts, experts of a token
QWEN3_30B = (2048, 768, 128, 8)
GPT_OSS = (2880, 2880, 32, 4)
NEMOTRON_3_NANO = (2688, 1856, 128, 6)  # without a gate
GEMMA_4 = (2816, 704, 128, 8)
_GLUS = {NEMOTRON_3_NANO: RELU2, GEMMA_4: GEGLU}
IN_GROUPS = Routing(
    num_experts=256,
    top_k=8,
    scores="sigmoid",
    num_groups=8,
    top_groups=4,
    group_score="top2",
)
BY_SPARSEMIXER = Routing(num_experts=16, top_k=2, scores="sparsemixer", jitter=0.01)
CLAMPED = Glu(alpha=1.702, offset=1.0, limit=7.0)

Shape = tuple[int, int, int, int]


@functools.lru_cache(maxsize=2)
def _prepared(scheme: str | None, shape: Shape) -> PreparedExperts:
    from tests.qkernels.compile.cases import weight_of

    hidden, inner, _, _ = shape

    def matrix(N: int, K: int):
        return empty(N, K) if scheme is None else weight_of(Scheme.parse(scheme), N, K)

    biased = shape == GPT_OSS
    glu = CLAMPED if biased else _GLUS.get(shape, SILU)
    weights = ExpertWeights(
        top_k=shape[3],
        gate_up=[matrix(glu.outputs(inner), hidden)] * 2,
        down=[matrix(hidden, inner)] * 2,
        gate_up_bias_EN=empty(2, 2 * inner) if biased else None,
        down_bias_EN=empty(2, hidden) if biased else None,
        glu=glu,
    )
    return ops.prepare_experts(weights, torch.bfloat16, "cpu", kernel="triton")


def experts(M: int, shape: Shape, scheme: str | None) -> None:
    """The plan is that of all experts."""
    from qkernels.moe import triton_experts

    prepared, k = _prepared(scheme, shape), shape[3]
    routes = Routes(torch.zeros(M, k, dtype=torch.int32), torch.ones(M, k))
    plan = triton_experts.plan(dataclasses.replace(prepared.problem, num_experts=shape[2]), M)
    ops.experts(empty(M, shape[0]), routes, prepared, plan)


def route(routing: Routing) -> None:
    ops.route(empty(1, routing.num_experts), routing)
    ops.route_tokens(empty(1, 4096), empty(routing.num_experts, 4096), routing)


def wanted(M: int, shape: Shape) -> None:
    """What `experts` here has for two experts alone."""
    from qkernels.moe.triton_wanted import wanted_experts, wanted_pairs

    routes = Routes(torch.zeros(M, shape[3], dtype=torch.int32), torch.ones(M, shape[3]))
    wanted_experts(routes.ids_Mk, shape[2])
    wanted_pairs(empty(M, shape[0]), routes, shape[2], 8)
