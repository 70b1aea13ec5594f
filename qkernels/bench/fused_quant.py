"""Benchmarks of int8 rounding fused into the operation before, against two separate operations."""

from collections.abc import Iterator

import torch

from formats.scheme import ActivationSpec
from qkernels import ops
from qkernels.bench.elementwise import ELEMENTWISE_M, NORM_SHAPES, SILU, SILU_SHAPES
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed
from qkernels.operands.codes import Codes, InputRounding

INT8 = InputRounding(ActivationSpec(), None)  # one scale per token


def _silu_and_mul_quantize(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    width = SILU_SHAPES[shape]
    for m in ms:
        num_bytes = 5 * m * width
        x = torch.randn(copies_needed(num_bytes), m, 2 * width, device="cuda", dtype=torch.bfloat16)
        yield _quantized_case(
            "silu_and_mul_quantize",
            shape,
            m,
            num_bytes,
            [lambda a=a: ops.activate(a, SILU, INT8) for a in x],
            [lambda a=a: ops.in_form(ops.activate(a, SILU), INT8) for a in x],
            baselines,
        )


def _add_rms_norm_quantize(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    C = NORM_SHAPES[shape]
    weight = torch.rand(C, device="cuda", dtype=torch.bfloat16) + 0.5
    spec = ops.NormSpec(weight_C=weight, eps=1e-5)
    for m in ms:
        num_bytes = 7 * m * C
        x, y = torch.randn(2, copies_needed(num_bytes), m, C, device="cuda", dtype=torch.bfloat16)
        pairs = list(zip(x, y, strict=True))
        yield _quantized_case(
            "add_rms_norm_quantize",
            shape,
            m,
            num_bytes,
            [lambda a=a, b=b: ops.norm(a, b, spec, INT8)[0] for a, b in pairs],
            [lambda a=a, b=b: ops.in_form(ops.norm(a, b, spec)[0], INT8) for a, b in pairs],
            baselines,
        )


def _quantized_case(
    op: str,
    shape: str,
    m: int,
    num_bytes: int,
    fused: list[Call],
    apart: list[Call],
    baselines: Baselines,
) -> Case:
    """Return a case whose check and baseline are the two separate operations."""

    def decoded(codes: Codes) -> torch.Tensor:
        return codes.codes_MK.float() * codes.scales_M1

    return Case(
        op=op,
        shape=shape,
        m=m,
        num_bytes=num_bytes,
        operations=8 * m * int(shape),
        calls=fused,
        values=decoded,
        want=decoded(apart[0]()),
        allowed_error=5e-3,
        baselines={"apart": apart} if "apart" in baselines else {},
    )


OPS: dict[str, BenchedOp] = {
    "add_rms_norm_quantize": BenchedOp(
        cases=_add_rms_norm_quantize,
        shapes=NORM_SHAPES,
        default_m=dict.fromkeys(NORM_SHAPES, ELEMENTWISE_M),
        baselines=("apart",),
    ),
    "silu_and_mul_quantize": BenchedOp(
        cases=_silu_and_mul_quantize,
        shapes=SILU_SHAPES,
        default_m=dict.fromkeys(SILU_SHAPES, ELEMENTWISE_M),
        baselines=("apart",),
    ),
}
