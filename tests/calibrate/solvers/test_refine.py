"""Refined solutions: less error than GPTQ on unseen inputs, and never more."""

import pytest
import torch

from calibrate.calibration.statistics import InputStatistics
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import RECIPES, check_makes
from calibrate.solvers import gptq
from calibrate.solvers.column_order import ORDERS
from calibrate.solvers.refine import _State, best_scales, descend, refine
from formats.errors import InputError
from formats.in_memory.packed import PackedWeight
from formats.numerics import affine
from formats.scheme import QuantSpec, Scheme

SPECS = [
    QuantSpec(bits=4, symmetric=True, group_size=32),
    QuantSpec(bits=4, symmetric=False, group_size=32),
    QuantSpec(bits=3, symmetric=True, group_size=32),
    QuantSpec(bits=2, symmetric=True, group_size=32),
    QuantSpec(bits=4, symmetric=True, group_size=-1),
]


def problem(width=160, outputs=24, tokens=2000):
    """A weight, statistics of inputs, and other inputs of the same distribution."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    inputs = torch.randn(2 * tokens, width, generator=generator) @ mix
    inputs *= torch.logspace(-1, 1, width)[torch.randperm(width, generator=generator)]
    stats = InputStatistics(width, "cpu")
    stats.update(inputs[:tokens])
    return torch.randn(outputs, width, generator=generator), stats, inputs[tokens:]


def damped(stats):
    hessian = stats.hessian_KK
    hessian.diagonal().add_(0.1 * hessian.diagonal().mean())
    return hessian


def rounded(weight, spec):
    scales, zeros = affine.choose_scales(weight, spec)
    codes = affine.quantize(weight, scales, zeros, spec)
    return PackedWeight.from_codes(codes, scales, zeros, spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_refinement_lowers_error_on_unseen_inputs(spec):
    weight, stats, unseen = problem()
    plain, refined = (
        gptq.solve(weight, stats, spec, "q", rounds=rounds).dequantize() for rounds in (0, 3)
    )
    errors = [float(((each - weight) @ unseen.t()).norm()) for each in (plain, refined)]
    assert errors[1] < 0.99 * errors[0]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_refinement_increases_no_row_error(spec):
    weight, stats, _ = problem()
    weight[3] = 0
    weight[4, :32] = 0
    hessian, start = damped(stats), rounded(weight, spec)
    found = refine(weight, start, hessian)
    found.check()
    before, after = (
        ((each.dequantize() - weight) @ hessian * (each.dequantize() - weight)).sum(1)
        for each in (start, found)
    )
    assert (after <= before * (1 + 1e-5) + 1e-6).all() and after.sum() < 0.9 * before.sum()
    assert torch.equal(found.zeros_NG, start.zeros_NG)


def test_refined_scales_equal_least_squares():
    """Against torch's solver in float64, on outputs instead of second moments."""
    weight, _, inputs = problem(width=64, outputs=5)
    spec = QuantSpec(bits=4, symmetric=True, group_size=16)
    start = _State.of(rounded(weight, spec), weight.device)
    scales = best_scales(weight, start, inputs.t() @ inputs / len(inputs))
    for row in range(len(weight)):
        parts = (start.steps()[row][None] * inputs.unflatten(1, (-1, 16))).sum(-1).double()
        want = torch.linalg.lstsq(parts, (inputs @ weight[row]).double()).solution
        assert torch.allclose(scales[row].double(), want, rtol=2e-3)


def test_refined_codes_are_coordinate_wise_optimal():
    """After passes until nothing changes, no change of a single code reduces the error."""
    weight, stats, _ = problem(width=32, outputs=4)
    spec = QuantSpec(bits=3, symmetric=True, group_size=16)
    hessian = damped(stats)
    state = _State.of(rounded(weight, spec), weight.device)
    for _ in range(20):
        state = descend(weight, state, hessian, spec)
    best = state.errors(weight, hessian)
    for column in range(32):
        for code in range(8):
            codes = state.codes_NK.clone()
            codes[:, column] = code
            other = _State(codes, state.scales_NG, state.zeros_NG).errors(weight, hessian)
            assert (other >= best * (1 - 1e-4)).all()


def test_refinement_keeps_input_order():
    weight, stats, unseen = problem()
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    plain, refined = (
        gptq.solve(weight, stats, spec, "q", ORDERS["act-order"], rounds) for rounds in (0, 3)
    )
    assert torch.equal(plain.input_order, refined.input_order)
    errors = [
        float(((each.dequantize() - weight) @ unseen.t()).norm()) for each in (plain, refined)
    ]
    assert errors[1] < 0.99 * errors[0]


@pytest.mark.parametrize("act_order", [False, True])
def test_recipe_refines_gptaq_solution(small_5m, tmp_path, act_order):
    errors = {}
    for name in ("gptaq", "gptaq+refine"):
        report = quantize_checkpoint(
            small_5m(),
            tmp_path / name,
            scheme=Scheme.parse("w3a16-sym-g64"),
            recipe=name,
            act_order=act_order,
            samples=16,
            sequence_length=128,
            progress=False,
        )
        errors[name] = [linear.held_out_error for linear in report.linears]
    assert sum(errors["gptaq+refine"]) < 0.99 * sum(errors["gptaq"])
    with pytest.raises(InputError, match="produces integer codes, not w4a16-mxfp4"):
        check_makes(RECIPES["gptaq+refine"], [Scheme.parse("w4a16-mxfp4")])
