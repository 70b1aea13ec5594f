"""Calls of the operations of mixtures of experts. All experts have the weights of two."""

import dataclasses
import functools

import torch

from qkernels import ops
from qkernels.moe.experts import ExpertWeights, PreparedExperts
from qkernels.moe.routing import GEGLU, RELU2, SILU, Glu, Routes, Routing
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import SM80, SM90, Case
from tests.qkernels.compile.cases.weights import scheme_of, weight_of

MIXTRAL = (4096, 14336, 8, 2)  # hidden size, inner size, experts, experts of a token
QWEN3_30B = (2048, 768, 128, 8)
GPT_OSS = (2880, 2880, 32, 4)
NEMOTRON_3_NANO = (2688, 1856, 128, 6)  # without a gate
GLM_4_5_AIR = (4096, 1408, 128, 8)
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
BY_SQRT_SOFTPLUS = Routing(num_experts=256, top_k=6, scores="sqrtsoftplus", normalized=True)
BY_SPARSEMIXER = Routing(num_experts=16, top_k=2, scores="sparsemixer", jitter=0.01)
CLAMPED = Glu(alpha=1.702, offset=1.0, limit=7.0)

Shape = tuple[int, int, int, int]


@functools.lru_cache(maxsize=2)
def prepared_experts(scheme: str | None, shape: Shape) -> PreparedExperts:
    hidden, inner, _, _ = shape

    def matrix(N: int, K: int):
        return empty(N, K) if scheme is None else weight_of(scheme_of(scheme), N, K)

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


def experts(
    M: int,
    shape: Shape,
    scheme: str | None,
    partial: bool = False,
    requested: str | None = None,
) -> None:
    """The plan is that of all experts. `partial`: some are elsewhere. `requested`: a variant."""
    from qkernels.moe import triton_experts

    prepared, k = prepared_experts(scheme, shape), shape[3]
    routes = Routes(torch.zeros(M, k, dtype=torch.int32), torch.ones(M, k))
    problem = dataclasses.replace(prepared.problem, routed_experts=shape[2], requested=requested)
    plan = triton_experts.plan(problem, M)
    if partial:
        prepared = dataclasses.replace(prepared, problem=problem)
    ops.experts(empty(M, shape[0]), routes, prepared, plan)


def route(routing: Routing) -> None:
    ops.route(empty(1, routing.num_experts), routing)
    ops.route_tokens(empty(1, 4096), empty(routing.num_experts, 4096), routing)


def route_of_rank(routing: Routing) -> None:
    """Experts get the numbers that a rank has for them."""
    numbers_E = torch.zeros(routing.num_experts, dtype=torch.int32)
    ops.route(empty(1, routing.num_experts), routing, None, numbers_E)
    x, weight = empty(1, 4096), empty(routing.num_experts, 4096)
    ops.route_tokens(x, weight, routing, numbers_E=numbers_E)


def active(M: int, shape: Shape) -> None:
    """Calls that `experts` does not make, since it has two experts."""
    from qkernels.moe.triton_active import active_experts, active_pairs

    routes = Routes(torch.zeros(M, shape[3], dtype=torch.int32), torch.ones(M, shape[3]))
    active_experts(routes.ids_Mk, shape[2])
    active_pairs(empty(M, shape[0]), routes, shape[2], 8)


EXPERTS: dict[str, Case] = {
    "experts w4a16 M=1": Case(
        run=lambda: experts(1, QWEN3_30B, "w4a16-sym"), quick=SM90, product="wgmma"
    ),
    "experts w4a16 M=16": Case(run=lambda: experts(16, MIXTRAL, "w4a16-asym"), product="wgmma"),
    "experts w4a16 M=2": Case(run=lambda: experts(2, MIXTRAL, "w4a16-asym"), product="wgmma"),
    "experts w4a16 M=8": Case(
        run=lambda: experts(8, MIXTRAL, "w4a16-sym"), quick=SM90, product="wgmma"
    ),
    "experts w4a16 M=32": Case(run=lambda: experts(32, QWEN3_30B, "w4a16-sym"), product="wgmma"),
    "experts w4a16 M=64": Case(run=lambda: experts(64, QWEN3_30B, "w4a16-sym"), product="wgmma"),
    "experts w4a16 M=128": Case(
        run=lambda: experts(128, MIXTRAL, "w4a16-asym"), quick=SM90, product="wgmma"
    ),
    "experts w4a16 M=4096": Case(run=lambda: experts(4096, MIXTRAL, "w4a16-sym"), product="wgmma"),
    **{
        f"experts {scheme} M={M}": Case(
            run=functools.partial(experts, M, shape, scheme, requested="sm90_few_tokens"),
            quick=quick,
            product="wgmma",
        )
        for scheme, M, shape, quick in (
            ("w4a16-sym-g64", 1, GLM_4_5_AIR, SM90),
            ("w4a16-asym-g64", 8, QWEN3_30B, ()),
            ("w4a16-sym-g64", 32, GLM_4_5_AIR, ()),
            ("w4a16-asym-g64", 64, QWEN3_30B, ()),
            ("w4a16-asym-g64", 128, MIXTRAL, ()),
            ("w4a16-asym-g32", 128, MIXTRAL, ()),
            ("w4a16-sym-g32", 1, GPT_OSS, SM90),
            ("w4a16-asym-g32", 64, GPT_OSS, SM90),
        )
    },
    "experts without a gate, w4a16 M=8": Case(
        run=lambda: experts(8, NEMOTRON_3_NANO, "w4a16-sym-g64"), product="wgmma"
    ),
    "few experts with GELU": Case(
        run=lambda: experts(8, GEMMA_4, "w4a16-sym-g64"), product="wgmma"
    ),
    "experts without a gate, bf16 M=512": Case(
        run=lambda: experts(512, NEMOTRON_3_NANO, None), product="wgmma"
    ),
    "experts w8a16 M=16": Case(run=lambda: experts(16, GPT_OSS, "w8a16-sym-g32"), product="wgmma"),
    **{
        f"experts {kind} M={M}": Case(
            run=functools.partial(experts, M, shape, f"w4a16-{kind}"),
            quick=quick,
            product="wgmma",
        )
        for kind, M, shape, quick in (
            ("mxfp4", 1, GPT_OSS, SM90),
            ("mxfp4", 16, GPT_OSS, ()),
            ("mxfp4", 64, GPT_OSS, ()),
            ("mxfp4", 1024, GPT_OSS, SM80),
            ("nvfp4", 4, QWEN3_30B, ()),
            ("nvfp4", 512, QWEN3_30B, ()),
        )
    },
    **{
        f"experts {kind} M={M}": Case(
            run=functools.partial(experts, M, shape, kind), quick=quick, product="wgmma"
        )
        for kind, M, shape, quick in (
            ("q4_k", 1, QWEN3_30B, SM90),
            ("q4_k", 512, MIXTRAL, ()),
            ("q6_k", 32, QWEN3_30B, ()),
            ("q6_k", 4096, QWEN3_30B, ()),
            ("q2_k", 8, MIXTRAL, ()),
            ("iq4_xs", 512, QWEN3_30B, ()),
        )
    },
    "experts w8a8 M=8": Case(run=lambda: experts(8, QWEN3_30B, "w8a8"), product="wgmma"),
    "experts w8a8 M=512": Case(run=lambda: experts(512, MIXTRAL, "w8a8"), product="wgmma"),
    "experts w8a8-fp8 M=1": Case(
        run=lambda: experts(1, QWEN3_30B, "w8a8-fp8"), product="wgmma", least=89
    ),
    "experts w8a8-fp8-block M=512": Case(
        run=lambda: experts(512, QWEN3_30B, "w8a8-fp8-block"),
        product="wgmma",
        least=89,
    ),
    "experts w4a8 M=1": Case(run=lambda: experts(1, QWEN3_30B, "w4a8"), product="wgmma"),
    "experts w4a8 M=512": Case(
        run=lambda: experts(512, QWEN3_30B, "w4a8-channel"), quick=SM90, product="wgmma"
    ),
    "experts w4a8 M=4096": Case(run=lambda: experts(4096, MIXTRAL, "w4a8"), product="wgmma"),
    "experts w4a8-fp8 M=8": Case(
        run=lambda: experts(8, MIXTRAL, "w4a8-fp8"), product="wgmma", least=89
    ),
    "experts w4a8-fp8 M=4096": Case(
        run=lambda: experts(4096, QWEN3_30B, "w4a8-fp8"), product="wgmma", least=89
    ),
    **{
        f"experts of a rank, {scheme} M={M}": Case(
            run=functools.partial(experts, M, shape, scheme, True), product="wgmma"
        )
        for scheme, M, shape in (
            ("w4a16-sym", 1, QWEN3_30B),
            ("w4a16-sym", 16, QWEN3_30B),
            ("w8a8", 8, QWEN3_30B),
            ("w4a16-mxfp4", 1024, GPT_OSS),
        )
    },
    "route on a rank": Case(run=lambda: route_of_rank(IN_GROUPS)),
    "active experts and pairs": Case(run=lambda: active(128, QWEN3_30B)),
    "experts bf16 M=4": Case(run=lambda: experts(4, QWEN3_30B, None), product="wgmma"),
    "experts bf16 M=1024": Case(run=lambda: experts(1024, GPT_OSS, None), product="wgmma"),
    "route": Case(run=lambda: route(Routing(num_experts=128, top_k=8))),
    "route in groups": Case(run=lambda: route(IN_GROUPS), quick=SM90),
    "route by sqrtsoftplus": Case(run=lambda: route(BY_SQRT_SOFTPLUS)),
    "route by sparsemixer": Case(run=lambda: route(BY_SPARSEMIXER)),
}
