"""Calls of the products of linears."""

import dataclasses
import functools

import torch

from formats.scheme import Scheme
from qkernels import ops
from qkernels.operands.limbs import LIMBS_MAX_ROWS
from qkernels.operands.split_k import Consumer
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import BF16, FP16, SM80, SM90, Case
from tests.qkernels.compile.cases.weights import prepared, weight_of

QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)

# each shape of config that a variant has; the first ones for every scheme
WNA16_SHAPES = (
    *((1, OUT), (4, GATE_UP), (16, GATE_UP), (64, OUT), (64, GATE_UP), (256, OUT)),
    *((512, QKV), (1024, QKV)),
)
W4A16_SHAPES = (
    *WNA16_SHAPES,
    *((4, OUT), (8, OUT), (32, OUT), (128, OUT), (1, GATE_UP), (8, GATE_UP), (128, GATE_UP)),
    *((8, QKV), (64, QKV), (5, DOWN), (16, DOWN), (32, DOWN), (64, DOWN), (256, DOWN), (512, DOWN)),
)
W8A8_SHAPES = (
    *((1, OUT), (16, GATE_UP), (64, QKV), (128, DOWN), (128, OUT), (256, QKV), (1024, QKV)),
    (4096, OUT),
)
W4A8_SHAPES = (
    *((1, OUT), (16, GATE_UP), (32, QKV), (64, QKV), (64, GATE_UP), (128, DOWN), (256, QKV)),
    (4096, OUT),
)
SCHEMES = {
    "w4a16": ("w4a16-sym", W4A16_SHAPES),
    "w4a16-asym": ("w4a16-asym", WNA16_SHAPES),
    "w8a16": ("w8a16-sym", WNA16_SHAPES),
    "w8a16-asym": ("w8a16-asym", WNA16_SHAPES),
    "w8a8": ("w8a8", W8A8_SHAPES),
    "w8a8-fp8": ("w8a8-fp8", W8A8_SHAPES),
    "w8a8-fp8-block": ("w8a8-fp8-block", W8A8_SHAPES),
    "w4a8": ("w4a8", W4A8_SHAPES),
    "w4a8-fp8": ("w4a8-fp8", W4A8_SHAPES),
    "w4a8-channel": ("w4a8-channel", W4A8_SHAPES),
}
QUICK_PRODUCTS = {
    ("w4a16", 16, GATE_UP): ("sm_80", "sm_90"),
    ("w4a16", 64, GATE_UP): SM90,
    ("w4a16-asym", 256, OUT): ("sm_90", "sm_120"),
    ("w8a8", 1024, QKV): SM90,
    ("w8a8-fp8", 64, QKV): ("sm_89", "sm_90"),
    ("w4a8", 16, GATE_UP): ("sm_80", "sm_90"),
    ("w4a8-fp8", 256, QKV): SM90,
}


def linear(
    M: int,
    shape: tuple[int, int],
    scheme: str,
    dtype: torch.dtype = BF16,
    bias: bool = False,
    consumer: Consumer | None = None,
    kernel: str | None = None,
) -> None:
    N, K = shape
    weight = prepared(scheme, shape, dtype, kernel)
    plan = ops.plan_linear(weight, M, consumer, fused=False)
    ops.linear(empty(M, K, dtype=dtype), weight, empty(N, dtype=dtype) if bias else None, plan)


def float_linear(M: int, shape: tuple[int, int]) -> None:
    from qkernels.linear import triton_float

    N, K = shape
    triton_float.multiply(empty(M, K), empty(N, K), empty(N))


def _products() -> dict[str, Case]:
    return {
        f"{name} M={M} {shape[0]}x{shape[1]}": Case(
            run=lambda M=M, shape=shape, scheme=scheme, bias="w8a8" in name: linear(
                M, shape, scheme, bias=bias
            ),
            quick=QUICK_PRODUCTS.get((name, M, shape), ()),
            product="mma" if M <= LIMBS_MAX_ROWS and "a16" in name else "wgmma",
            least=89 if "fp8" in name else 80,
        )
        for name, (scheme, shapes) in SCHEMES.items()
        for M, shape in shapes
    }


def multiples(M: int, shape: tuple[int, int], scheme: str) -> None:
    """Compile products with scales that are multiples of one number in each row."""
    packed = weight_of(Scheme.parse(scheme), *shape)
    weight = ops.prepare_weight(
        dataclasses.replace(packed, scales_NG=torch.ones_like(packed.scales_NG)), BF16
    )
    assert weight.problem.in_multiples == (weight.kernel == "sm90_w4a8")
    plan = ops.plan_linear(weight, M, fused=False)
    ops.linear(empty(M, shape[1], dtype=BF16), weight, None, plan)


MORE_PRODUCTS = {
    **{
        f"multiples of {name} M={M}": Case(
            run=functools.partial(multiples, M, shape, name),
            quick=SM90 if M == 4096 else (),
            product="wgmma",
        )
        for name, M, shape in (
            ("w4a8", 1, OUT),
            ("w4a8", 16, GATE_UP),
            ("w4a8", 64, QKV),
            ("w4a8", 256, QKV),
            ("w4a8", 4096, OUT),
            ("w4a8-g32", 1024, OUT),
            ("w4a8-g64", 32, DOWN),
        )
    },
    "w4a8 group 32": Case(run=lambda: linear(256, OUT, "w4a8-g32"), product="wgmma"),
    "w4a8 group 32, few rows": Case(run=lambda: linear(16, DOWN, "w4a8-g32"), product="wgmma"),
    "w4a8-fp8 group 64": Case(
        run=lambda: linear(128, OUT, "w4a8-fp8-g64", FP16, True), product="wgmma", least=89
    ),
    "w4a8 group 256, float16": Case(
        run=lambda: linear(64, QKV, "w4a8-g256", FP16, True), product="wgmma"
    ),
    "w4a16 group 32": Case(run=lambda: linear(64, OUT, "w4a16-sym-g32"), product="wgmma"),
    "w8a16 group 32": Case(run=lambda: linear(16, OUT, "w8a16-sym-g32"), product="wgmma"),
    "w4a16 group 256, float16": Case(
        run=lambda: linear(512, DOWN, "w4a16-sym-g256", FP16), product="wgmma"
    ),
    "w4a16 float16 asymmetric, limbs": Case(
        run=lambda: linear(2, GATE_UP, "w4a16-asym", FP16), quick=SM90, product="mma"
    ),
    "w4a16 float16 asymmetric, split": Case(
        run=lambda: linear(5, DOWN, "w4a16-asym", FP16, True), product="wgmma"
    ),
    "w8a16 float16 asymmetric": Case(
        run=lambda: linear(256, OUT, "w8a16-asym", FP16, True), product="wgmma"
    ),
    "w4a16 for a norm": Case(
        run=lambda: linear(32, OUT, "w4a16-sym", consumer="norm"), quick=SM90, product="wgmma"
    ),
    "w4a16 for a rotation": Case(
        run=lambda: linear(64, QKV, "w4a16-asym", bias=True, consumer="rope"), product="wgmma"
    ),
    **{
        f"w4a16 fixed order {name} M={M}": Case(
            run=functools.partial(linear, M, shape, scheme, bias=True, kernel="fixed_order"),
            quick=SM90 if (M, name) == (512, "o") else (),
            product="wgmma",
        )
        for M, name, shape, scheme in (
            (1, "qkv", QKV, "w4a16-sym"),
            (64, "down", DOWN, "w4a16-asym"),
            (128, "qkv", QKV, "w4a16-sym"),
            (512, "o", OUT, "w4a16-sym"),
            (1024, "down", DOWN, "w4a16-asym"),
            (4096, "qkv", QKV, "w4a16-sym"),
        )
    },
    **{
        f"float fixed order M={M}": Case(
            run=functools.partial(float_linear, M, OUT),
            quick=SM80 if M == 8 else (),
            product="wgmma",
        )
        for M in (1, 8, 64, 300, 4096)
    },
    **{
        f"{name} M={M} {shape[0]}x{shape[1]}": Case(
            run=functools.partial(linear, M, shape, name),
            quick=quick,
            product="wgmma" if M <= 1024 else None,
        )
        for name, M, shape, quick in (
            ("q4_k", 1, OUT, ()),
            ("q4_k", 16, OUT, SM90),
            ("q4_k", 32, QKV, ()),
            ("q4_k", 64, OUT, ()),
            ("q4_k", 64, GATE_UP, ()),
            ("q4_k", 512, OUT, ()),
            ("q4_1", 16, OUT, SM80),
            ("q4_1", 64, OUT, ()),
            ("q5_k", 16, OUT, ()),
            ("q6_k", 64, OUT, ()),
            ("q6_k", 2048, OUT, ()),
            ("q3_k", 16, OUT, SM90),
            ("q3_k", 2048, OUT, ()),
            ("q2_k", 64, OUT, ()),
            ("iq4_xs", 16, OUT, ()),
        )
    },
    **{
        f"{kind} M={M} {shape[0]}x{shape[1]}": Case(
            run=functools.partial(linear, M, shape, f"w4a16-{kind}", dtype),
            quick=quick,
            product="wgmma" if M <= 1024 else None,
        )
        for kind, M, shape, dtype, quick in (
            ("mxfp4", 1, OUT, BF16, ()),
            ("mxfp4", 16, OUT, BF16, SM90),
            ("mxfp4", 32, QKV, FP16, ()),
            ("mxfp4", 64, GATE_UP, BF16, ()),
            ("mxfp4", 512, (2880, 2880), BF16, ()),
            ("mxfp4", 2048, OUT, BF16, ()),
            ("nvfp4", 8, OUT, FP16, ()),
            ("nvfp4", 16, OUT, BF16, SM80),
            ("nvfp4", 64, OUT, BF16, ()),
            ("nvfp4", 64, GATE_UP, BF16, ()),
            ("nvfp4", 512, OUT, BF16, ()),
        )
    },
    "q4_k for a norm": Case(run=lambda: linear(32, OUT, "q4_k", consumer="norm"), product="wgmma"),
    "w4a16 dequantized": Case(run=lambda: linear(2048, (128, 128), "w4a16-sym"), quick=SM80),
}

PRODUCTS: dict[str, Case] = _products() | MORE_PRODUCTS
