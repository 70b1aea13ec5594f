"""The rounding rule against exact arithmetic, and what the choice of scales promises."""

import re
from fractions import Fraction

import pytest
import torch

from formats.errors import CheckpointError, RangeError, SchemeError
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.weights import round_to_nearest, same_weight
from formats.numerics import affine
from formats.scheme import CHANNEL, SCHEMES, QuantSpec, Scheme

SPECS = [
    QuantSpec(bits=4, symmetric=True, group_size=32),
    QuantSpec(bits=4, symmetric=False, group_size=64),
    QuantSpec(bits=8, symmetric=True, group_size=CHANNEL),
    QuantSpec(bits=3, symmetric=False, group_size=32),
]


def random_weight(dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 128, generator=generator).to(dtype)


def squared_error_NG(weight: torch.Tensor, scales, zeros, spec: QuantSpec) -> torch.Tensor:
    codes = affine.quantize(weight, scales, zeros, spec)
    error = affine.dequantize(codes, scales, zeros).double() - weight.double()
    return error.unflatten(1, (scales.shape[1], -1)).square().sum(-1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_equal_exact_quotient_rounded_half_to_even(spec, dtype):
    # half-precision operands: the float32 quotient cannot hit a tie that the exact one misses
    weight = random_weight(dtype)
    scales, zeros = affine.choose_scales(weight, spec)
    codes = affine.quantize(weight, scales, zeros, spec)
    length = spec.group_length(128)
    for n, k in [(n, k) for n in range(0, 32, 5) for k in range(128)]:
        scale, zero = float(scales[n, k // length]), int(zeros[n, k // length])
        exact = round(Fraction(float(weight[n, k])) / Fraction(scale)) + zero
        assert int(codes[n, k]) == min(max(exact, 0), spec.max_code)
        value = float(affine.dequantize(codes, scales, zeros)[n, k]) if k % 31 == 0 else None
        assert value is None or value == scale * (int(codes[n, k]) - zero)


def test_ties_go_to_the_even_code():
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    weight = (torch.arange(32).float() - 16).mul(0.25).expand(32, 32)
    scales = torch.full((32, 1), 0.5, dtype=torch.float16)
    codes = affine.quantize(weight, scales, torch.full((32, 1), 8, dtype=torch.uint8), spec)
    # weights -1.25, -0.75, -0.25, 0.25, 0.75, 1.25 lie between two codes each
    assert codes[0, [11, 13, 15, 17, 19, 21]].tolist() == [6, 6, 8, 8, 10, 10]


@pytest.mark.parametrize("bits", [4, 8])
def test_search_is_never_worse_than_the_largest_magnitude_rule(bits):
    spec = QuantSpec(bits=bits, symmetric=True, group_size=32)
    weight = random_weight()
    scales, zeros = affine.choose_scales(weight, spec)
    found = squared_error_NG(weight, scales, zeros, spec)
    largest = weight.float().unflatten(1, (-1, 32)).abs().amax(-1)
    for divisor in (2 ** (bits - 1) - 1, 2 ** (bits - 1), (2**bits - 1) / 2):
        plain = squared_error_NG(weight, (largest / divisor).half(), zeros, spec)
        if divisor == (2**bits - 1) / 2:
            assert found.sum() <= plain.sum()
        else:
            assert (found <= plain * (1 + 1e-5)).all()
    assert found.sum() < 0.99 * squared_error_NG(weight, (largest / 7).half(), zeros, spec).sum()


def test_asymmetric_search_is_never_worse_than_the_full_range():
    spec = QuantSpec(bits=4, symmetric=False, group_size=32)
    weight = random_weight() + 0.7
    scales, zeros = affine.choose_scales(weight, spec)
    groups = weight.float().unflatten(1, (-1, 32))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    plain = ((high - low) / 15).half()
    plain_zeros = (-low / plain.float()).round().to(torch.uint8)
    found = squared_error_NG(weight, scales, zeros, spec)
    assert (found <= squared_error_NG(weight, plain, plain_zeros, spec) * (1 + 1e-5)).all()
    assert zeros.unique().numel() > 1


@pytest.mark.parametrize("sign", [1, -1])
def test_group_of_one_sign_keeps_its_range(sign):
    # AutoGPTQ and GPTQModel halve the scale where no weight is negative, and clip the upper half
    spec = QuantSpec(bits=4, symmetric=True, group_size=128)
    weight = sign * torch.linspace(0.1, 2.92, 128).expand(32, 128)
    scales, zeros = affine.choose_scales(weight, spec)
    restored = affine.dequantize(affine.quantize(weight, scales, zeros, spec), scales, zeros)
    assert (restored - weight).abs().max() <= scales.float().abs().max()
    assert sign * restored[0, -1] > 2.7


def test_extreme_weight_uses_longer_code_side_by_negative_scale():
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    weight = torch.arange(32).float().remainder(8).expand(32, 32).clone()
    weight[:, 0] = 8.0
    scales, zeros = affine.choose_scales(weight, spec)
    codes = affine.quantize(weight, scales, zeros, spec)
    assert (scales == -1).all()
    assert (codes[:, 0] == 0).all()
    assert torch.equal(affine.dequantize(codes, scales, zeros), weight)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_all_zero_group_has_scale_one_and_dequantizes_to_zero(spec):
    weight = random_weight()
    length = spec.group_length(128)
    weight[3, :length] = 0
    scales, zeros = affine.choose_scales(weight, spec)
    codes = affine.quantize(weight, scales, zeros, spec)
    assert scales[3, 0] == 1
    assert (codes[3, :length] == zeros[3, 0]).all()
    assert (affine.dequantize(codes, scales, zeros)[3, :length] == 0).all()


@pytest.mark.parametrize("name", ["w8a8-fp8", "w8a8-fp8-static", "w8a8-fp8-block"])
def test_all_zero_float8_weight_dequantizes_to_zero(name):
    spec = Scheme.parse(name).weight
    weight = Fp8Weight.from_float(torch.zeros(200, 256), spec)
    assert (weight.scales_RC == 1).all()
    assert (weight.dequantize() == 0).all()


@pytest.mark.parametrize("method", list(affine.SCALE_METHODS))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("magnitude", "text"),
    [(1e7, r"largest value is 65504"), (1e30, r"largest value is 65504")]
    + [(1e-7, "coarse below 9.54e-07"), (1e-30, "coarse below 9.54e-07")],
)
def test_weights_beyond_float16_scales_are_refused(method, symmetric, magnitude, text):
    spec = QuantSpec(bits=4, symmetric=symmetric, group_size=32)
    weight = random_weight(torch.float32) * magnitude
    largest = f"layers.7.up: its largest weight is {float(weight.abs().max()):.3g}, which"
    with pytest.raises(RangeError, match=re.escape(largest) + f".*{text}.*`ignore`"):
        affine.choose_scales(weight, spec, "layers.7.up", method=method)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_largest_and_smallest_scales(bits, symmetric):
    """Up to float16's largest scale; down to 8 of the smallest steps, or all that the bits have."""
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=32)
    side = 2 ** (bits - 1)
    weight = torch.full((1, 32), -1.0)
    weight[:, 1] = 1 - 1 / side  # the full range of either kind of grid
    smallest = affine.MIN_SCALE * min(side, affine.MIN_STEPS)
    for good in (65504 * side * 0.999, smallest * 1.001):
        scales, _ = affine.choose_scales(weight * good, spec, method="full-range")
        assert torch.isfinite(scales).all() and (scales.abs() >= affine.MIN_SCALE).all()
    for bad in (65504 * side * 1.001, smallest * 0.999):
        with pytest.raises(RangeError):
            affine.choose_scales(weight * bad, spec, method="full-range")


def test_tiny_group_gets_smallest_scale(monkeypatch):
    monkeypatch.setattr(affine, "BLOCK_ELEMENTS", 128)  # a row is a block
    for small, fine in ((slice(0, 16), slice(16, 32)), (slice(16, 32), slice(0, 16))):
        weight = random_weight(torch.float32)
        weight[small] *= 1e-9
        scales, _ = affine.choose_scales(weight, SPECS[0])
        assert (scales[small].abs() == affine.MIN_SCALE).all()
        assert (scales[fine].abs() > 0.1).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weight_that_is_not_finite_is_refused_by_name(bad):
    weight = random_weight()
    weight[31, 127] = bad
    with pytest.raises(CheckpointError, match=r"layers\.7\.down_proj.*NaN or infinity"):
        affine.choose_scales(weight, SPECS[0], "layers.7.down_proj")


def test_row_blocks_do_not_change_searched_scales(monkeypatch):
    weight, spec = random_weight(), SPECS[0]
    whole = affine.choose_scales(weight, spec)
    monkeypatch.setattr(affine, "BLOCK_ELEMENTS", 128 * 5)
    in_blocks = affine.choose_scales(weight, spec)
    assert all(torch.equal(a, b) for a, b in zip(whole, in_blocks, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scale_search_methods_do_not_increase_error(spec):
    weight = random_weight()
    errors = {}
    for method in affine.SCALE_METHODS:
        scales, zeros = affine.choose_scales(weight, spec, method=method)
        errors[method] = squared_error_NG(weight, scales, zeros, spec)
    assert (errors["mse"] <= errors["full-range"] * (1 + 1e-5)).all()
    assert (errors["mse"] <= errors["absmax"] * (1 + 1e-5)).all()
    default = affine.choose_scales(weight, spec)
    named = affine.choose_scales(weight, spec, method="mse")
    assert all(torch.equal(a, b) for a, b in zip(default, named, strict=True))
    with pytest.raises(SchemeError, match="scale method 'best'.*known: absmax, full-range, mse"):
        affine.choose_scales(weight, spec, method="best")


def test_named_methods_equal_formulas():
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    weight = random_weight(torch.float32)
    groups = weight.unflatten(1, (-1, 32))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    absmax, _ = affine.choose_scales(weight, spec, method="absmax")
    torch.testing.assert_close(absmax.float().abs(), extreme.abs() / 7, rtol=1e-3, atol=0)
    full, _ = affine.choose_scales(weight, spec, method="full-range")
    torch.testing.assert_close(full.float(), -extreme / 8, rtol=1e-3, atol=0)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_importance_weights_errors(spec):
    weight = random_weight().float()
    importance = torch.logspace(-3, 3, 128)[torch.randperm(128)]

    def weighted(scales, zeros):
        codes = affine.quantize(weight, scales, zeros, spec)
        error = (affine.dequantize(codes, scales, zeros) - weight).square() * importance
        return float(error.sum())

    found = affine.choose_scales(weight, spec, importance_K=importance)
    plain = affine.choose_scales(weight, spec)
    assert weighted(*found) < weighted(*plain)
    equal = affine.choose_scales(weight, spec, importance_K=torch.ones(128))
    assert all(torch.equal(a, b) for a, b in zip(equal, plain, strict=True))
    zero = affine.choose_scales(weight, spec, importance_K=torch.zeros(128))
    assert all(torch.equal(a, b) for a, b in zip(zero, plain, strict=True))
    for bad in (float("nan"), -1.0):
        with pytest.raises(SchemeError, match="up.*importance"):
            affine.choose_scales(weight, spec, "up", importance_K=torch.full((128,), bad))


@pytest.mark.parametrize("symmetric", [True, False])
def test_off_grid_distance_is_in_steps(symmetric):
    """Two groups of 8 with other scales, one of them negative."""
    spec = QuantSpec(bits=4, symmetric=symmetric, group_size=8)
    scales = torch.tensor([[0.5, -2.0]]).half()
    zeros = torch.tensor([[8, 8] if symmetric else [3, 0]], dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)[None]
    weight = affine.dequantize(codes, scales, zeros)
    assert affine.off_grid(weight, scales, zeros, spec) == 0
    for place, moved, steps in ((2, 0.125, 0.25), (12, 0.5, 0.25), (12, 1.0, 0.5)):
        other = weight.clone()
        other[0, place] += moved
        assert affine.off_grid(other, scales, zeros, spec) == pytest.approx(steps)
    beyond = weight.clone()
    beyond[0, 0] = 0.5 * (15 + 1.75 - float(zeros[0, 0]))
    assert affine.off_grid(beyond, scales, zeros, spec) == pytest.approx(1.75)
    beyond[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="NaN"):
        affine.off_grid(beyond, scales, zeros, spec)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight[:1],
        lambda weight: weight[:16],
        lambda weight: weight[:, :64],
        lambda weight: weight.t(),
        lambda weight: weight.flatten(),
    ],
)
def test_off_grid_with_other_shape_is_refused(change):
    weight = random_weight()
    grid = affine.choose_scales(weight, SPECS[0])
    wanted = r"does not fit a grid of \[32, 4\] scales"
    with pytest.raises(CheckpointError, match=wanted):
        affine.off_grid(change(weight), *grid, SPECS[0])
    for spec in (SPECS[2], QuantSpec(bits=4, symmetric=True, group_size=64)):
        with pytest.raises(CheckpointError, match=wanted):
            affine.off_grid(weight, *grid, spec)
    affine.off_grid(torch.nn.Parameter(weight), *grid, SPECS[0])


@pytest.mark.parametrize(
    "weight",
    [torch.ones(64), torch.ones(2, 32, 64), torch.ones(32, 64).int(), torch.ones(32, 64) + 0j],
)
def test_input_that_is_not_a_float_matrix_is_refused(weight):
    with pytest.raises(CheckpointError, match=r"layers.0.up: expected a float weight \[N, K\]"):
        affine.choose_scales(weight, SPECS[0], "layers.0.up")


@pytest.mark.parametrize("name", SCHEMES)
def test_row_blocks_round_bitwise_equal(name, monkeypatch):
    """Rounding works in blocks of rows; a block of scales and a scale of all rows cross them."""
    torch.manual_seed(3)
    weight_NK = torch.randn(300, 384).bfloat16() * 0.05
    weight_NK[7] *= 100
    weight_NK[9] = 0
    spec = SCHEMES[name].weight
    found = []
    for elements in (2**22, 5000):
        monkeypatch.setattr(affine, "BLOCK_ELEMENTS", elements)
        weight = round_to_nearest(weight_NK, spec)
        found.append([weight, weight.as_codes()] if isinstance(weight, Fp4Weight) else [weight])
    for whole, blocked in zip(*found, strict=True):
        assert same_weight(whole, blocked) is None


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w4a16-asym"])
@pytest.mark.parametrize("weighs", [False, True])
def test_summation_order_does_not_change_scales(scheme, weighs, monkeypatch):
    """Another device adds errors in float32 in another order, and gets other last bits."""
    generator = torch.Generator().manual_seed(7)
    weight_NK = torch.randn(512, 8192, generator=generator)
    importance_K = torch.rand(8192, generator=generator) if weighs else None
    spec, sums = Scheme.parse(scheme).weight, affine._sums
    wanted = affine.choose_scales(weight_NK, spec, importance_K=importance_K)

    def elsewhere(errors, dtype):
        found = sums(errors, dtype)
        if dtype == torch.float64:
            return found
        return found * (1 + 4e-6 * (2 * torch.rand(found.shape, generator=generator) - 1))

    monkeypatch.setattr(affine, "_sums", elsewhere)
    found = affine.choose_scales(weight_NK, spec, importance_K=importance_K)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4a16-sym", "w4a16-asym", "w8a8"])
def test_gpu_rounding_equals_cpu_bitwise(scheme):
    """A trainer compares its digests with those of a server on another device."""
    weight_NK = torch.randn(4096, 8192, generator=torch.Generator().manual_seed(8)).bfloat16()
    spec = Scheme.parse(scheme).weight
    ours, theirs = (round_to_nearest(weight_NK.to(device), spec) for device in ("cpu", "cuda"))
    for name in ("words_NW", "scales_NG", "zeros_NG"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name).cpu()), name
