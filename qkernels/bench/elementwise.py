"""Benchmarks of norms and the gated activation, with Llama-3-8B's widths."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed

NORM_SHAPES = {"4096": 4096}
SILU_SHAPES = {"14336": 14336}
ELEMENTWISE_M = (1, 32, 256, 4096)
SILU = ops.ActSpec(kind="silu")


def _add_rms_norm(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _norm("add_rms_norm", shape, ms, baselines)


def _rms_norm(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _norm("rms_norm", shape, ms, baselines)


def _norm(op: str, shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    C = NORM_SHAPES[shape]
    reduced = op == "add_rms_norm"
    weight = torch.rand(C, device="cuda", dtype=torch.bfloat16) + 0.5
    spec = ops.NormSpec(weight_C=weight, eps=1e-5)
    for m in ms:
        num_bytes = 2 * m * C * (4 if reduced else 2)
        x, y = torch.randn(2, copies_needed(num_bytes), m, C, device="cuda", dtype=torch.bfloat16)
        total = (x[0] + y[0] if reduced else x[0]).double()
        want = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        calls = [
            lambda a=a, b=b: ops.norm(a, b if reduced else None, spec)[0]
            for a, b in zip(x, y, strict=True)
        ]
        others: dict[str, list[Call]] = {}
        if "torch" in baselines:
            others["torch"] = [
                lambda a=a, b=b: functional.rms_norm(a + b if reduced else a, (C,), weight, 1e-5)
                for a, b in zip(x, y, strict=True)
            ]
        yield Case(
            op=op,
            shape=shape,
            m=m,
            num_bytes=num_bytes,
            operations=4 * m * C,
            calls=calls,
            want=want,
            allowed_error=5e-3,
            baselines=others,
        )


def _silu_and_mul(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    width = SILU_SHAPES[shape]
    for m in ms:
        num_bytes = 6 * m * width
        x = torch.randn(copies_needed(num_bytes), m, 2 * width, device="cuda", dtype=torch.bfloat16)
        gate, up = x[0].double().chunk(2, dim=-1)
        others: dict[str, list[Call]] = {}
        if "torch" in baselines:
            others["torch"] = [
                lambda a=a: functional.silu(a[..., :width]) * a[..., width:] for a in x
            ]
        yield Case(
            op="silu_and_mul",
            shape=shape,
            m=m,
            num_bytes=num_bytes,
            operations=5 * m * width,
            calls=[lambda a=a: ops.activate(a, SILU) for a in x],
            want=functional.silu(gate) * up,
            allowed_error=5e-3,
            baselines=others,
        )


OPS: dict[str, BenchedOp] = {
    "rms_norm": BenchedOp(
        cases=_rms_norm,
        shapes=NORM_SHAPES,
        default_m=dict.fromkeys(NORM_SHAPES, ELEMENTWISE_M),
        baselines=("torch",),
    ),
    "add_rms_norm": BenchedOp(
        cases=_add_rms_norm,
        shapes=NORM_SHAPES,
        default_m=dict.fromkeys(NORM_SHAPES, ELEMENTWISE_M),
        baselines=("torch",),
    ),
    "silu_and_mul": BenchedOp(
        cases=_silu_and_mul,
        shapes=SILU_SHAPES,
        default_m=dict.fromkeys(SILU_SHAPES, ELEMENTWISE_M),
        baselines=("torch",),
    ),
}
