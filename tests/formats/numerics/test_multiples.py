"""Scales that are multiples of one number in each row: finding them, choosing them."""

from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest
from formats.numerics import affine
from formats.numerics.multiples import MOST, find_multiples, nearest_multiples, units_of
from formats.scheme import SCHEMES, ActivationSpec, QuantSpec, Scheme

DTYPES = {torch.float16: 7, torch.bfloat16: 4}  # dtype of scales -> significant bits of a unit
W4A8 = Scheme.parse("w4a8-g32").weight
FREE = Scheme(weight=W4A8).weight


def largest_unit(row: list[float]) -> Fraction | None:
    """The largest number that the row's scales are whole multiples of, if those are at most 15."""
    scales = [Fraction(each) for each in row]
    most = max(map(abs, scales))
    units = (most / largest for largest in range(1, MOST + 1))
    return next((u for u in units if all((s / u).denominator == 1 for s in scales)), None)


@given(
    st.lists(st.integers(-40, 40).filter(bool), min_size=1, max_size=6),
    st.integers(1, 127),
    st.integers(-17, 0),
)
@settings(max_examples=100, deadline=None)
def test_units_equal_exact_fractions(multiples, significand, exponent):
    row = [m * significand * 2.0**exponent for m in multiples]
    if max(map(abs, row)) > affine.MAX_SCALE:
        return
    scales = torch.tensor([row], dtype=torch.float64).half()
    if (scales == 0).any():
        return
    unit, found = largest_unit(scales[0].tolist()), find_multiples(scales)
    if unit is not None and Fraction(float(torch.tensor(float(unit)).float())) != unit:
        unit = None  # not a number of float32
    assert (found is None) == (unit is None)
    if found is not None:
        units_N1, multiples_NG = found
        assert units_N1.dtype == torch.float32 and multiples_NG.dtype == torch.int8
        assert Fraction(units_N1.item()) == unit
        assert torch.equal(units_N1.double() * multiples_NG, scales.double())


def test_row_without_unit_disables_multiples():
    scales = torch.tensor([[1.0, 2.0, 15.0], [0.5, -0.25, 3.75]]).half()
    units, multiples = find_multiples(scales)
    assert units.tolist() == [[1.0], [0.25]]
    assert multiples.tolist() == [[1, 2, 15], [2, -1, 15]]
    for wrong in (1.0 + 2**-10, 16.0, float("inf"), float("nan")):
        scales[0, 0] = wrong
        assert find_multiples(scales) is None


def test_third_is_not_a_unit():
    """1/3 times 3 is 1 in floats, but not exactly."""
    assert find_multiples(torch.tensor([[1.0, 1 / 3]])) is None
    assert find_multiples(torch.tensor([[3.0, 2.0]]))[1].tolist() == [[3, 2]]


def test_zero_scales_are_multiples():
    units, multiples = find_multiples(torch.tensor([[0.0, 0.0], [0.0, 0.5]]))
    assert units.tolist() == [[0.0], [0.5]] and multiples.tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.integers(0, 2**32), st.floats(1e-6, 1.0))
@settings(max_examples=100, deadline=None)
def test_nearest_multiples_are_exact_and_nearest(dtype, seed, size):
    generator = torch.Generator().manual_seed(seed)
    scales = size * (torch.rand(9, 5, generator=generator) + 0.05)
    scales = (scales * (2 * torch.randint(0, 2, (9, 5), generator=generator) - 1)).to(dtype)
    scales = torch.where(scales == 0, torch.finfo(dtype).tiny, scales)
    units = units_of(scales)
    found = nearest_multiples(scales, units)
    assert found.dtype == dtype and find_multiples(found) is not None
    multiples = found.double() / units
    assert torch.equal(multiples, multiples.round())
    assert multiples.abs().min() >= 1 and multiples.abs().max() == MOST
    assert torch.equal(found.sign(), scales.sign())
    inside = (multiples.abs() > 1) & (multiples.abs() < MOST)
    distance = (found.double() - scales.double()).abs()
    assert (distance <= units / 2)[inside].all(), "no other multiple is nearer"
    significands = torch.frexp(units)[0] * 2 ** DTYPES[dtype]
    assert torch.equal(significands, significands.round()), "few enough bits"
    most = scales.double().abs().amax(1, keepdim=True)
    assert ((units * MOST - most).abs() <= most / 2 ** DTYPES[dtype] + 15 * 2.0**-24).all()


def test_schemes_that_round_scales_to_multiples():
    names = [name for name in SCHEMES if Scheme.parse(name).weight.in_multiples]
    assert names == ["w4a8"]
    assert Scheme.parse("w4a8-g32").weight.in_multiples
    assert Scheme.parse("w4a8", 64).weight.in_multiples
    assert not Scheme.parse("w4a8-channel").weight.in_multiples
    assert not Scheme(weight=W4A8).weight.in_multiples, "inputs of 16 bits"
    assert not Scheme(weight=W4A8, activation=ActivationSpec(bits=4)).weight.in_multiples
    assert Scheme(weight=Scheme(weight=W4A8).weight, activation=ActivationSpec()) == Scheme.parse(
        "w4a8-g32"
    )
    assert QuantSpec(bits=4, symmetric=True, group_size=32) == W4A8, "files do not state it"


@pytest.mark.parametrize("importance", [False, True], ids=["equal", "weighted"])
def test_multiples_cost_little_error(importance):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    weight *= torch.rand(64, 8, generator=generator).repeat_interleave(32, 1) + 0.5
    importance_K = torch.rand(256, generator=generator) if importance else None
    errors = []
    for spec in (FREE, W4A8):
        scales, zeros = affine.choose_scales(weight, spec, importance_K=importance_K)
        assert (find_multiples(scales) is not None) == spec.in_multiples
        codes = affine.quantize(weight, scales, zeros, spec)
        error = (affine.dequantize(codes, scales, zeros) - weight).square()
        errors.append(float((error if importance_K is None else error * importance_K).sum()))
    assert errors[0] < errors[1] < 1.06 * errors[0]
    units = units_of(affine.choose_scales(weight, FREE, importance_K=importance_K)[0])
    scales = nearest_multiples(affine.choose_scales(weight, FREE)[0], units)
    codes = affine.quantize(weight, scales, zeros, W4A8)
    error = (affine.dequantize(codes, scales, zeros) - weight).square()
    nearest = float((error if importance_K is None else error * importance_K).sum())
    assert errors[1] < nearest, "errors decide, not the distance of scales"


def test_all_zero_groups_and_rows_do_not_set_unit():
    """Their scale would be 1: it must not decide the unit of small weights."""
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) / 1000
    weight[0, :32], weight[1] = 0, 0
    spec = Scheme.parse("w4a8-g32").weight
    scales, zeros = affine.choose_scales(weight, spec)
    assert find_multiples(scales) is not None
    codes = affine.quantize(weight, scales, zeros, spec)
    found = affine.dequantize(codes, scales, zeros)
    assert (found[weight == 0] == 0).all()
    assert float((found - weight).norm() / weight.norm()) < 0.1


def test_one_group_keeps_its_scale():
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    found, free = (affine.choose_scales(weight, spec)[0] for spec in (W4A8, FREE))
    assert torch.equal(found, free)


def test_row_blocks_round_bitwise_equal(monkeypatch):
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    whole = round_to_nearest(weight, W4A8)
    monkeypatch.setattr(affine, "BLOCK_ELEMENTS", 3 * 64)
    in_blocks = round_to_nearest(weight, W4A8)
    assert torch.equal(whole.scales_NG, in_blocks.scales_NG)
    assert torch.equal(whole.words_NW, in_blocks.words_NW)


def test_smallest_weights_keep_valid_scales():
    """Near the smallest scale a unit has few bits, in float16's subnormal numbers."""
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)) * 2e-5
    found = round_to_nearest(weight, W4A8)
    assert isinstance(found, PackedWeight) and find_multiples(found.scales_NG) is not None
    assert (found.scales_NG != 0).all()
