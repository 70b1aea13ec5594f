"""Benchmarks of a mixture-of-experts layer, from the router's product to the next norm.

Tokens are random, so all experts are equally likely. Calls differ in their tokens: each one reads
its own experts, and the floor counts the experts that a call reads on average.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from formats.in_memory.fp8 import FP8_DTYPE, Fp8Weight, scales_shape
from formats.in_memory.weights import with_activation
from formats.scheme import CHANNEL, Scheme
from qkernels import ops
from qkernels.bench.blocks import random_blocks
from qkernels.bench.linear import GROUP, random_weight
from qkernels.bench.measure import COLD_BYTES, Baselines, BenchedOp, Call, Case
from qkernels.moe.experts import ExpertMatrix, ExpertWeights, PreparedExperts
from qkernels.moe.routing import SILU, Routes, Routing
from qkernels.moe.tuned import TUNED, tuned_problem
from qkernels.moe.variants import NAMES, SM90_FEW_TOKENS

# (hidden size, inner size, experts, experts per token)
MOE_SHAPES = {
    "mixtral": (4096, 14336, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "glm-4.5-air": (4096, 1408, 128, 8),
}
UNEVEN = ("gpt-oss-20b", "gpt-oss-120b", "glm-4.5-air")  # no multiples of 256
MOE_M = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
MAX_CALLS = 16  # maximum number of calls of a case; each has different tokens
OF_8_BIT_INPUTS = ("moe_w8a8", "moe_fp8", "moe_fp8_block", "moe_w4a8", "moe_w4a8_fp8")
SM90_VARIANTS = frozenset(name for name in NAMES if name.startswith("sm90_"))

Make = Callable[[int, int, int], ExpertMatrix]  # (N, K, seed) -> matrix


def _packed(N: int, K: int, seed: int) -> ExpertMatrix:
    return random_weight(N, K, seed, group_size=GROUP if K % GROUP == 0 else 32)


def _w4a8(scheme: str) -> Make:
    parsed = Scheme.parse(scheme)

    def make(N: int, K: int, seed: int) -> ExpertMatrix:
        return with_activation(_packed(N, K, seed), parsed, None)

    return make


def _int8(N: int, K: int, seed: int) -> ExpertMatrix:
    weight = random_weight(N, K, seed, bits=8, group_size=CHANNEL)
    return with_activation(weight, Scheme.parse("w8a8"), None)


def _float8(scheme: str) -> Make:
    parsed = Scheme.parse(scheme)

    def make(N: int, K: int, seed: int) -> ExpertMatrix:
        generator = torch.Generator("cuda").manual_seed(seed)
        codes_NK = torch.randn(N, K, device="cuda", generator=generator) * 60
        scales_RC = torch.full(scales_shape(parsed.weight, N, K), 1 / 4096, device="cuda")
        weight = Fp8Weight(codes_NK=codes_NK.to(FP8_DTYPE), scales_RC=scales_RC, spec=parsed.weight)
        return with_activation(weight, parsed, None)

    return make


def _bf16(N: int, K: int, seed: int) -> ExpertMatrix:
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16, generator=generator)
    return weight * K**-0.5


def _cases(op: str, make: Make, bits: int) -> Callable[..., Iterator[Case]]:
    def cases(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
        C, inner, E, k = MOE_SHAPES[shape]
        weights = ExpertWeights(
            top_k=k,
            gate_up=[make(2 * inner, C, e) for e in range(E)],
            down=[make(C, inner, E + e) for e in range(E)],
            glu=SILU,
        )
        prepared = ops.prepare_experts(weights, torch.bfloat16, "cuda")
        layer = _Layer(prepared, C, E, k)
        num_bytes = 3 * C * inner * bits // 8  # bytes of an expert
        for m in ms:
            yield _case(op, shape, m, layer, weights, num_bytes, bits, baselines)

    return cases


class _Layer:
    """A layer: experts, router and norm."""

    def __init__(self, prepared: PreparedExperts, C: int, E: int, k: int) -> None:
        self.prepared = prepared
        self.routing = Routing(num_experts=E, top_k=k, normalized=True)
        self.router_EC = torch.randn(E, C, device="cuda", dtype=torch.bfloat16) * C**-0.5
        self.norm_C = torch.ones(C, device="cuda", dtype=torch.bfloat16)

    def without(self, variants: frozenset[str]) -> "_Layer":
        """Return a copy of the layer that must not use these kernel variants."""
        never = ",".join(f"-{name}" for name in sorted(variants))
        other = copy.copy(self)
        problem = replace(self.prepared.problem, requested=never)
        other.prepared = replace(self.prepared, problem=problem)
        return other

    def route(self, x_MC: torch.Tensor) -> Routes:
        return ops.route_tokens(x_MC, self.router_EC, self.routing)

    def run(self, x_MC: torch.Tensor, residual_MC: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = ops.experts(x_MC, self.route(x_MC), self.prepared)
        return ops.norm(out, residual_MC, ops.NormSpec(weight_C=self.norm_C, eps=1e-6))


def _case(
    op: str,
    shape: str,
    m: int,
    layer: _Layer,
    weights: ExpertWeights,
    num_bytes: int,
    bits: int,
    baselines: Baselines,
) -> Case:
    C, inner, E, k = MOE_SHAPES[shape]
    distinct = E * (1 - (1 - k / E) ** m)
    count = max(2, min(MAX_CALLS, int(COLD_BYTES / (distinct * num_bytes)) + 1))
    xs = [torch.randn(m, C, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    zeros_MC = torch.zeros(m, C, device="cuda", dtype=torch.bfloat16)
    routes = [layer.route(x) for x in xs]
    read = sum(len(each.ids_Mk.unique()) for each in routes) / count
    has_tiles = op == "moe_w4a16"  # the only one with tunable configs
    has_tiles &= ops.plan_experts(layer.prepared, m).variant == SM90_FEW_TOKENS.name
    others: dict[str, list[Call]] = {}
    if "experts" in baselines:  # without router and norm
        others["experts"] = [
            lambda x=x, r=r: ops.experts(x, r, layer.prepared)
            for x, r in zip(xs, routes, strict=True)
        ]
    if "triton" in baselines:  # with the portable kernels
        plain = layer.without(SM90_VARIANTS)
        others["triton"] = [lambda x=x: plain.run(x, zeros_MC) for x in xs]
    return Case(
        op=op,
        shape=shape,
        m=m,
        num_bytes=int(read * num_bytes) + 2 * E * C + 2 * m * C * 2,
        operations=2 * m * k * 3 * C * inner,
        operation_rate=2 if op in OF_8_BIT_INPUTS else 1,
        calls=[lambda x=x: layer.run(x, zeros_MC) for x in xs],
        want=_want(xs[0], routes[0], weights),
        values=lambda normed_and_total: normed_and_total[1],
        # between the products the kernels round to bfloat16, some to 8 bits
        allowed_error=7e-2 if bits == 8 or op in OF_8_BIT_INPUTS else 1.5e-2,
        baselines=others,
        tuned=(TUNED, tuned_problem(layer.prepared.problem, m)) if has_tiles else None,
    )


def _want(x_MC: torch.Tensor, routes: Routes, weights: ExpertWeights) -> torch.Tensor:
    """Return the layer's result in float32, without intermediate rounding."""
    total_MC = torch.zeros(x_MC.shape, device="cuda")
    for expert in routes.ids_Mk.unique().tolist():
        token, choice = (routes.ids_Mk == expert).nonzero(as_tuple=True)
        gate_up, down = (_float(each[expert]) for each in (weights.gate_up, weights.down))
        gate, up = (x_MC[token].float() @ gate_up.t()).chunk(2, -1)
        out = (functional.silu(gate) * up) @ down.t()
        total_MC.index_add_(0, token, out * routes.weights_Mk[token, choice, None])
    return total_MC


def _float(matrix: ExpertMatrix) -> torch.Tensor:
    return matrix.float() if isinstance(matrix, torch.Tensor) else matrix.dequantize()


def _op(op: str, make: Make, bits: int, leave_out: tuple[str, ...] = ()) -> BenchedOp:
    shapes = {name: shape for name, shape in MOE_SHAPES.items() if name not in leave_out}
    return BenchedOp(
        cases=_cases(op, make, bits),
        shapes=shapes,
        default_m=dict.fromkeys(shapes, MOE_M),
        baselines=("experts", "triton"),
    )


OPS: dict[str, BenchedOp] = {
    "moe_w4a16": _op("moe_w4a16", _packed, 4),
    "moe_mxfp4": _op("moe_mxfp4", partial(random_blocks, "mxfp4"), 4),
    "moe_nvfp4": _op("moe_nvfp4", partial(random_blocks, "nvfp4"), 4),
    "moe_q4_k": _op("moe_q4_k", partial(random_blocks, "q4_k"), 4, UNEVEN),
    "moe_w4a8": _op("moe_w4a8", _w4a8("w4a8"), 4),
    "moe_w4a8_fp8": _op("moe_w4a8_fp8", _w4a8("w4a8-fp8"), 4),
    "moe_w8a8": _op("moe_w8a8", _int8, 8),
    "moe_fp8": _op("moe_fp8", _float8("w8a8-fp8"), 8),
    "moe_fp8_block": _op(
        "moe_fp8_block", _float8("w8a8-fp8-block"), 8, ("gpt-oss-20b", "gpt-oss-120b")
    ),
    "moe_bf16": _op("moe_bf16", _bf16, 16),
}
