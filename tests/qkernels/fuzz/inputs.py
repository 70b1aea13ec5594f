"""Fuzzed operations that make inputs of products: 8-bit codes, or limbs."""

import torch

from formats.numerics.activation import quantize_input
from formats.scheme import ActivationSpec
from qkernels import ops, reference
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs, to_limbs
from tests.qkernels.fuzz.fuzzer import FuzzedOp
from tests.qkernels.fuzz.values import (
    BOOLS,
    DEVICE,
    EPS,
    FLOAT,
    HALF,
    ROWS,
    WIDTHS,
    assert_near,
    rows,
)
from tests.qkernels.limb_bits import written


def activation_of(kind: str) -> tuple[ActivationSpec, torch.Tensor | None]:
    number = "float" if "float8" in kind else "int"
    if "static" not in kind:
        return ActivationSpec(type=number), None
    return ActivationSpec(type=number, dynamic=False, per="tensor"), torch.tensor(0.05)


SILU = ops.ActSpec(kind="silu")
ACTIVATIONS = ("int8", "int8 static", "float8", "float8 static")


def fuzz_quantize_input(*, M, C, activation, dtype, strided, spread, seed):
    spec, scale = activation_of(activation)
    x = rows((M, C), dtype, seed, strided, spread)
    on_device = None if scale is None else scale.to(DEVICE)
    codes, scales = ops.quantize_input(x, spec, on_device, kernel="triton")
    want_codes, want_scales = quantize_input(x.cpu(), spec, scale)
    assert torch.equal(scales.cpu(), want_scales), "scales differ from the reference's"
    same = codes.cpu().view(torch.uint8) == want_codes.view(torch.uint8)
    assert same.all(), f"{int((~same).sum())} codes differ from the reference's"


def fuzz_fused_quantize(*, op, M, C, activation, dtype, spread, seed):
    spec, scale = activation_of(activation)
    form = InputRounding(spec, None if scale is None else scale.to(DEVICE))
    x = rows((M, 2 * C if op == "silu" else C), dtype, seed, spread=spread)
    if op == "silu":
        codes, scales = ops.activate(x, SILU, form, kernel="triton")
        want_codes, want_scales = reference.activate(x, SILU, form)
    else:
        norm = ops.NormSpec(weight_C=rows((C,), dtype, seed + 2), eps=1e-5)
        residual = rows((M, C), dtype, seed + 3, spread=2) if op == "norm of a sum" else None
        (codes, scales), total = ops.norm(x, residual, norm, form, kernel="triton")
        (want_codes, want_scales), want_total = reference.norm(x, residual, norm, form)
        assert torch.equal(total, want_total), "the sum differs from the reference's"
    # another order of the sum of squares, or another exp, may move a value by one rounding
    eps = EPS[dtype]
    torch.testing.assert_close(scales, want_scales, rtol=max(4 * eps, 1e-5), atol=0)
    got, want = codes.float() * scales, want_codes.float() * want_scales
    step = scales if spec.type == "int" else want.abs() / 8 + scales * 2**-9
    assert_near(op, want, got, step * 1.001 + 4 * eps * want.abs())


DIGIT_OPS = ("to_limbs", "norm", "norm of a sum", "silu")


def fuzz_digits(*, op, M, steps, bits, with_sums, dtype, strided, spread, seed):
    """Values near those of the plain operation, and the very limbs of these values."""
    form, K = LimbForm(bits=bits, with_sums=with_sums), 128 * steps
    x = rows((M, 2 * K if op == "silu" else K), dtype, seed, strided, spread)
    if op == "to_limbs":
        want, limbs = x, ops.to_limbs(x, form, kernel="triton")
    elif op == "silu":
        want = reference.activate(x, SILU)
        limbs = ops.activate(x, SILU, form, kernel="triton")
    else:
        norm = ops.NormSpec(weight_C=rows((K,), dtype, seed + 2), eps=1e-5)
        residual = rows((M, K), dtype, seed + 3, spread=2) if op == "norm of a sum" else None
        want, want_total = reference.norm(x, residual, norm)
        limbs, total = ops.norm(x, residual, norm, form, kernel="triton")
        assert torch.equal(total, want_total), "the sum differs from torch's"
    got = written(limbs)
    exact = from_limbs(limbs)
    values = exact.to(want.dtype)
    # 31 bits of the step's largest
    largest = want.double().view(M, steps, 128).abs().amax(2).repeat_interleave(128, 1)
    slack = 0 if op == "to_limbs" else 4 * EPS[dtype]
    bound = slack * want.double().abs() + 2**-29 * largest
    bound += 0 if op == "to_limbs" else EPS[dtype] * 1e-2
    assert_near(op, want, exact, bound)
    if op == "to_limbs":
        values = x
    for have, twin in zip(got, written(to_limbs(values, form)), strict=True):
        assert torch.equal(have, twin), "not the limbs of these values"


INPUTS: dict[str, FuzzedOp] = {
    "quantize_input": FuzzedOp(
        run=fuzz_quantize_input,
        fields={
            "M": ROWS,
            "C": (*WIDTHS, 32768),
            "activation": ACTIVATIONS,
            "dtype": FLOAT,
            "strided": BOOLS,
            "spread": (0, 4, 12),
        },
        dynamic=("M", "strided", "spread"),
        cost=lambda *, M, C, **_: M * C * 10,
    ),
    "fused_quantize": FuzzedOp(
        run=fuzz_fused_quantize,
        fields={
            "op": DIGIT_OPS[1:],
            "M": ROWS,
            "C": WIDTHS,
            "activation": ACTIVATIONS,
            "dtype": FLOAT,
            "spread": (0, 4),
        },
        dynamic=("M", "spread"),
        cost=lambda *, M, C, **_: M * C * 10,
    ),
    "limbs": FuzzedOp(
        run=fuzz_digits,
        fields={
            "op": DIGIT_OPS,
            "M": (1, 2, 3, 4),
            "steps": (1, 2, 3, 5, 8, 9, 17, 32, 112, 130),
            "bits": (4, 8),
            "with_sums": BOOLS,
            "dtype": HALF,
            "strided": BOOLS,
            "spread": (0, 4),
        },
        dynamic=("M", "spread"),
        cost=lambda *, M, steps, **_: M * steps * 128 * 50,
    ),
}
