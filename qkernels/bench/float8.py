"""Benchmarks of products of float8 weights and inputs, with Llama-3-8B's shapes [N, K].

Baseline `scaled_mm` is torch's product of existing codes, with the tensor core's 14-bit sums
("fast"). `scaled_mm_exact` promotes the sums regularly, as the kernels here do.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from formats.in_memory.fp8 import FP8_DTYPE, Fp8Weight, scales_shape
from formats.scheme import Scheme
from qkernels import ops
from qkernels.bench.linear import LINEAR_M, LINEAR_SHAPES
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed
from qkernels.linear import reference as linear_reference
from qkernels.linear.prepared import PreparedWeight


def _weights(scheme: Scheme, N: int, K: int) -> list[Fp8Weight]:
    weights = []
    for seed in range(copies_needed(N * K)):
        generator = torch.Generator("cuda").manual_seed(seed)
        codes_NK = torch.randn(N, K, device="cuda", generator=generator) * 60
        shape = scales_shape(scheme.weight, N, K)
        scales_RC = (torch.rand(shape, device="cuda", generator=generator) + 0.5) / 4096
        weights.append(
            Fp8Weight(
                codes_NK=codes_NK.to(FP8_DTYPE),
                scales_RC=scales_RC,
                spec=scheme.weight,
                activation=scheme.activation,
            )
        )
    return weights


def _fp8(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """Yield cases that include rounding x to float8."""
    N, K = LINEAR_SHAPES[shape]
    packed = _weights(Scheme.parse("w8a8-fp8"), N, K)
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in packed]
    plain = [ops.prepare_weight(w, torch.bfloat16, kernel="triton_w8a8") for w in packed]
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        codes, scales = ops.quantize_input(x, packed[0].activation)
        others: dict[str, list[Call]] = {}
        if "codes" in baselines:
            others["codes"] = [
                lambda c=codes, s=scales, w=w: ops.linear_codes(c, s, w) for w in weights
            ]
        for name, fast in (("scaled_mm", True), ("scaled_mm_exact", False)):
            if name in baselines:
                others[name] = [
                    lambda c=codes, s=scales, w=w, fast=fast: _scaled_mm(c, s, w, fast)
                    for w in plain
                ]
        x_rounded = codes.double() * scales.double()
        yield _case("w8a8_fp8", shape, m, x, x_rounded, packed[0], weights, others)


def _scaled_mm(
    codes: torch.Tensor, scales: torch.Tensor, weight: PreparedWeight, fast: bool
) -> torch.Tensor:
    return torch._scaled_mm(
        codes,
        weight.tensors["codes"].t(),
        scale_a=scales,
        scale_b=weight.tensors["scales"][None],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _fp8_block(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """Yield cases with one scale per 128 inputs of x and per 128 x 128 of the weight."""
    N, K = LINEAR_SHAPES[shape]
    scheme = Scheme.parse("w8a8-fp8-block")
    packed = _weights(scheme, N, K)
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in packed]
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        codes, scales = ops.quantize_input(x, scheme.activation)
        others: dict[str, list[Call]] = {}
        if "torch" in baselines:
            plain = linear_reference.prepare_weight(packed[0], torch.bfloat16)
            plain = replace(plain, activation=scheme.activation)
            others["torch"] = [lambda x=x, w=plain: linear_reference.linear(x, w)]
        x_rounded = codes.double().unflatten(1, (-1, 128)) * scales.double()[..., None]
        yield _case("w8a8_fp8_block", shape, m, x, x_rounded.flatten(1), packed[0], weights, others)


def _case(
    op: str,
    shape: str,
    m: int,
    x: torch.Tensor,
    x_rounded: torch.Tensor,
    packed: Fp8Weight,
    weights: list[PreparedWeight],
    others: dict[str, list[Call]],
) -> Case:
    N, K = LINEAR_SHAPES[shape]
    return Case(
        op=op,
        shape=shape,
        m=m,
        num_bytes=N * K + packed.scales_RC.nbytes + 2 * m * (N + K),
        operations=2 * m * N * K,
        operation_rate=2,
        calls=[lambda w=w: ops.linear(x, w) for w in weights],
        want=x_rounded @ packed.dequantize(torch.float64).t(),
        allowed_error=5e-3,
        baselines=others,
    )


OPS: dict[str, BenchedOp] = {
    "w8a8_fp8": BenchedOp(
        cases=_fp8,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("codes", "scaled_mm", "scaled_mm_exact"),
    ),
    "w8a8_fp8_block": BenchedOp(
        cases=_fp8_block,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("torch",),
    ),
}
