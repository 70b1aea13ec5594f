"""Benchmarks of products with a quantized weight, with Llama-3-8B's shapes [N, K].

The bf16 baseline reads the dequantized weight: a GPU at its power limit multiplies other values at
another speed (4096 rows of gate_up: 1366 us on these, 1188 us on small normal values).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight, round_to_nearest, with_activation
from formats.numerics.multiples import nearest_multiples, units_of
from formats.scheme import CHANNEL, QuantSpec, Scheme
from qkernels import ops
from qkernels.bench.measure import (
    Baselines,
    BenchedOp,
    Call,
    Case,
    copies_needed,
    read_shape,
    relative_error,
)
from qkernels.errors import KernelError
from qkernels.linear.prepared import PreparedWeight
from qkernels.w4a8.tuned import TUNED as W4A8
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16.tuned import TUNED as WNA16

LINEAR_SHAPES = {  # [N, K]
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
LINEAR_M = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
GROUP = 128


def random_weight(
    N: int, K: int, seed: int, bits: int = 4, group_size: int = GROUP
) -> PackedWeight:
    generator = torch.Generator("cuda").manual_seed(seed)
    spec = QuantSpec(bits=bits, symmetric=True, group_size=group_size)
    G = spec.num_groups(K)
    words = torch.randint(
        -(2**31), 2**31, (N, K * bits // 32), dtype=torch.int32, device="cuda", generator=generator
    )
    scales = (torch.rand(N, G, device="cuda", generator=generator) + 0.5) / 512
    zeros = torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8, device="cuda")
    return PackedWeight(
        words_NW=words, scales_NG=scales.half(), zeros_NG=zeros, spec=spec, in_features=K
    )


def w4a16_weights(N: int, K: int) -> tuple[list[PreparedWeight], torch.Tensor]:
    """Return enough weights to exceed the L2, and the first one's values in float64 [N, K]."""
    packed = [random_weight(N, K, seed=i) for i in range(copies_needed(N * K // 2))]
    weight_NK = packed[0].dequantize(torch.float64)
    return [ops.prepare_weight(each, torch.bfloat16) for each in packed], weight_NK


def _w4a16(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _weight_only(4, shape, ms, baselines)


def _w8a16(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    yield from _weight_only(8, shape, ms, baselines - {"int_mm"})


def _weight_only(
    bits: int, shape: str, ms: tuple[int, ...], baselines: Baselines
) -> Iterator[Case]:
    N, K = read_shape(LINEAR_SHAPES, shape)
    num_bytes = N * K * bits // 8
    packed = [random_weight(N, K, seed=i, bits=bits) for i in range(copies_needed(num_bytes))]
    weight_NK = packed[0].dequantize(torch.float64)
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in packed]
    dense = int8 = rivals = ()
    if "cublas" in baselines:
        dense = [each.dequantize(torch.bfloat16) for each in packed[: copies_needed(2 * N * K)]]
    if "int_mm" in baselines:
        int8 = [each.codes().to(torch.int8) for each in packed[: copies_needed(N * K)]]
    if "gemlite" in baselines:
        rivals = [_gemlite_linear(each) for each in packed]
        _check_rival("gemlite", rivals[0], weight_NK)
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        others: dict[str, list[Call]] = {}
        if dense:
            others["cublas"] = [lambda x=x, w=w: functional.linear(x, w) for w in dense]
        if int8 and m > 16:  # torch._int_mm takes only more than 16 rows
            codes = torch.randint(-127, 128, (m, K), dtype=torch.int8, device="cuda")
            others["int_mm"] = [lambda c=codes, w=w: torch._int_mm(c, w.t()) for w in int8]
        if rivals:
            others["gemlite"] = [lambda x=x, f=f: f(x) for f in rivals]
        yield Case(
            op=f"w{bits}a16",
            shape=shape,
            m=m,
            num_bytes=num_bytes + 2 * N * K // GROUP + 2 * m * (N + K),
            operations=2 * m * N * K,
            calls=[lambda x=x, w=w: ops.linear(x, w) for w in weights],
            want=x.double() @ weight_NK.t(),
            allowed_error=5e-3,
            baselines=others,
            tuned=(WNA16, {"N": N, "K": K, "group": GROUP, "bits": bits, "M": m}),
        )


def _w8a8(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """Yield cases that include rounding x to int8; baselines get x in the form that they need."""
    N, K = read_shape(LINEAR_SHAPES, shape)
    packed = [
        with_activation(
            random_weight(N, K, i, bits=8, group_size=CHANNEL), Scheme.parse("w8a8"), None
        )
        for i in range(copies_needed(N * K))
    ]
    weight_NK = packed[0].dequantize(torch.float64)
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in packed]
    dense = plain = ()
    if "cublas" in baselines:
        dense = [each.dequantize(torch.bfloat16) for each in packed[: copies_needed(2 * N * K)]]
    if "int_mm" in baselines:
        plain = [ops.prepare_weight(w, torch.bfloat16, kernel="triton_w8a8") for w in packed]
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        codes, scales = ops.quantize_input(x, packed[0].activation)
        others: dict[str, list[Call]] = {}
        if "codes" in baselines:  # ours, of an input that is rounded already
            others["codes"] = [
                lambda c=codes, s=scales, w=w: ops.linear_codes(c, s, w) for w in weights
            ]
        if dense:
            others["cublas"] = [lambda x=x, w=w: functional.linear(x, w) for w in dense]
        if plain and m > 16:  # torch._int_mm takes only more than 16 rows
            others["int_mm"] = [
                lambda c=codes, w=w: torch._int_mm(c, w.tensors["codes"].t()) for w in plain
            ]
        yield Case(
            op="w8a8",
            shape=shape,
            m=m,
            num_bytes=N * K + 4 * N + 2 * m * (N + K),
            operations=2 * m * N * K,
            operation_rate=2,
            calls=[lambda x=x, w=w: ops.linear(x, w) for w in weights],
            want=(codes.double() * scales.double()) @ weight_NK.t(),
            allowed_error=5e-3,
            baselines=others,
            tuned=(W8A8, {"N": N, "K": K, "integers": True, "M": m}),
        )


def _w4a8(
    scheme: str, op: str, shape: str, ms: tuple[int, ...], baselines: Baselines
) -> Iterator[Case]:
    """Yield cases that include rounding x to 8 bits.

    With int8 inputs, scales are multiples of one number in each row, as `quantize` writes them;
    op `w4a8_groups` has other scales. Baseline `w4a16` multiplies the same codes by x in 16 bits,
    `w8a8` multiplies 8-bit codes of the same shape.
    """
    N, K = read_shape(LINEAR_SHAPES, shape)
    num_bytes = N * K // 2 + 2 * N * K // GROUP
    four = [random_weight(N, K, i) for i in range(copies_needed(num_bytes))]
    if op == "w4a8":
        four = [in_multiples(each) for each in four]
    packed = [with_activation(each, Scheme.parse(scheme), None) for each in four]
    weight_NK = packed[0].dequantize(torch.float64)
    weights = [ops.prepare_weight(each, torch.bfloat16) for each in packed]
    w4a16 = w8a8 = ()
    if "w4a16" in baselines:
        w4a16 = [ops.prepare_weight(each, torch.bfloat16) for each in four]
    if "w8a8" in baselines:
        of_8_bits = Scheme.parse("w8a8" if scheme == "w4a8" else "w8a8-fp8")
        w8a8 = [
            ops.prepare_weight(_in_8_bits(each, of_8_bits), torch.bfloat16)
            for each in four[: copies_needed(N * K)]
        ]
    for m in ms:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        codes, scales = ops.quantize_input(x, packed[0].activation)
        others: dict[str, list[Call]] = {}
        if "codes" in baselines:  # ours, of an input that is rounded already
            others["codes"] = [
                lambda c=codes, s=scales, w=w: ops.linear_codes(c, s, w) for w in weights
            ]
        if w4a16:
            others["w4a16"] = [lambda x=x, w=w: ops.linear(x, w) for w in w4a16]
        if w8a8:
            others["w8a8"] = [lambda x=x, w=w: ops.linear(x, w) for w in w8a8]
        integers = scheme == "w4a8"
        group = K if weights[0].problem.in_multiples else GROUP
        yield Case(
            op=op,
            shape=shape,
            m=m,
            num_bytes=num_bytes + 2 * m * (N + K),
            operations=2 * m * N * K,
            operation_rate=2,
            calls=[lambda x=x, w=w: ops.linear(x, w) for w in weights],
            want=(codes.double() * scales.double()) @ weight_NK.t(),
            allowed_error=5e-3,
            baselines=others,
            tuned=(W4A8, {"N": N, "K": K, "group": group, "integers": integers, "M": m}),
        )


def in_multiples(packed: PackedWeight) -> PackedWeight:
    """Return the weight with scales that are multiples of one number in each row."""
    scales_NG = nearest_multiples(packed.scales_NG, units_of(packed.scales_NG))
    return replace(packed, scales_NG=scales_NG)


def _in_8_bits(packed: PackedWeight, scheme: Scheme) -> Weight:
    """Return the weight rounded to 8 bits with one scale per output, as a baseline for times."""
    rounded = round_to_nearest(packed.dequantize(torch.float32), scheme.weight)
    return with_activation(rounded, scheme, None)


def _check_rival(
    name: str, linear: Callable[[torch.Tensor], torch.Tensor], weight_NK: torch.Tensor
) -> None:
    """Raise KernelError if a baseline's result is wrong: a wrong call is not worth comparing."""
    x = torch.randn(4, weight_NK.shape[1], device="cuda", dtype=torch.bfloat16)
    error = relative_error(linear(x), x.double() @ weight_NK.t())
    if not error < 2e-2:
        problem = f"is wrong on this GPU: relative error {error:.1e}"
        raise KernelError(f"--baseline {name}", problem, "leave it out")


def _gemlite_linear(packed: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    """Call gemlite 0.6 as documented, with unsigned codes and zeros as numbers."""
    from gemlite.helper import A16Wn

    return A16Wn(device="cuda", dtype=torch.bfloat16).from_weights(
        packed.codes().to(torch.uint8), packed.scales_NG, packed.zeros_NG, packed.spec.bits, GROUP
    )


OPS: dict[str, BenchedOp] = {
    "w4a16": BenchedOp(
        cases=_w4a16,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("cublas", "int_mm", "gemlite"),
        dims=2,
    ),
    "w8a16": BenchedOp(
        cases=_w8a16,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("cublas", "gemlite"),
        dims=2,
    ),
    "w8a8": BenchedOp(
        cases=_w8a8,
        shapes=LINEAR_SHAPES,
        default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
        baselines=("codes", "cublas", "int_mm"),
        dims=2,
    ),
    **{
        op: BenchedOp(
            cases=functools.partial(_w4a8, scheme, op),
            shapes=LINEAR_SHAPES,
            default_m=dict.fromkeys(LINEAR_SHAPES, LINEAR_M),
            baselines=("codes", "w4a16", "w8a8"),
            dims=2,
        )
        for op, scheme in (("w4a8", "w4a8"), ("w4a8_groups", "w4a8"), ("w4a8_fp8", "w4a8-fp8"))
    },
}
