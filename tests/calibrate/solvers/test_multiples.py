"""W4A8 weights of every solver: scales of each row are multiples of one number."""

from dataclasses import replace

import pytest
import torch

from calibrate.calibration.statistics import InputStatistics
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import RECIPES
from calibrate.solvers import gptq
from calibrate.solvers.column_order import ORDERS
from calibrate.solvers.tuning import _Grid
from formats.checkpoint import CheckpointReader, read_json
from formats.layouts import decode_linear
from formats.numerics.multiples import find_multiples
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qkernels import ops

FIELDS = ("weight_packed", "weight_scale", "weight_shape")
SCHEME = Scheme.parse("w4a8-g32")
FREE = Scheme(weight=SCHEME.weight).weight


@pytest.fixture(scope="module")
def linear():
    """A weight [24, 160] and statistics of its inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 160, generator=generator)
    inputs *= torch.logspace(-1, 1, 160)[torch.randperm(160, generator=generator)]
    stats = InputStatistics(160, "cpu")
    stats.update(inputs)
    weight = torch.randn(24, 160, generator=generator)
    return weight * (0.5 + torch.rand(24, 5, generator=generator)).repeat_interleave(32, 1), stats


def output_error(weight, packed, stats):
    order = packed.input_order
    found = packed.dequantize() if order is None else packed.dequantize()[:, order.argsort()]
    return float(stats.squared_error(weight - found).sum())


@pytest.mark.parametrize("name", ["rtn", "imatrix", "gptq", "gptaq+refine"])
def test_solver_scales_are_multiples(linear, name):
    weight, stats = linear
    found = RECIPES[name].solver(weight.clone(), stats, SCHEME.weight, "q")
    free = RECIPES[name].solver(weight.clone(), stats, FREE, "q")
    assert find_multiples(found.scales_NG) is not None
    assert find_multiples(free.scales_NG) is None
    assert output_error(weight, found, stats) < 1.15 * output_error(weight, free, stats)


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_late_and_refined_scales_are_multiples(linear, order, rounds):
    weight, stats = linear
    found = gptq.solve(weight.clone(), stats, SCHEME.weight, "q", ORDERS[order], rounds)
    assert find_multiples(found.scales_NG) is not None


def test_refinement_lowers_error_of_multiples(linear):
    weight, stats = linear
    errors = [
        output_error(weight, gptq.solve(weight.clone(), stats, SCHEME.weight, "q", None, n), stats)
        for n in (0, 2)
    ]
    assert errors[1] < errors[0]


def test_tuned_scales_are_multiples(linear):
    """Scales that training has moved; it computes with what is stored."""
    weight, stats = linear
    packed = RECIPES["rtn"].solver(weight.clone(), stats, SCHEME.weight, "q")
    grid = _Grid(packed, weight)
    grid.weight().square().sum().backward()
    assert (grid.gain.grad != 0).all(), "the rounding lets the gradient through"
    with torch.no_grad():
        grid.gain.copy_(torch.linspace(-0.3, 0.3, grid.gain.numel()).view_as(grid.gain))
    tuned = grid.finished("q")
    assert not torch.equal(tuned.scales_NG, packed.scales_NG)
    assert find_multiples(tuned.scales_NG) is not None
    assert torch.equal(tuned.dequantize(), grid.weight().detach())


def test_quantized_folder_runs_as_integers(tiny_model, tmp_path):
    """From the float model to the plan of the sm_90 kernel; the report says so."""
    report = quantize_checkpoint(tiny_model("qwen3"), tmp_path / "out", scheme=SCHEME, recipe="rtn")
    assert all(linear.in_multiples for linear in report.linears)
    assert "sums of integers" in report.to_text()
    reader = CheckpointReader(tmp_path / "out")
    config = QuantConfig.from_dict(read_json(tmp_path / "out" / "config.json")[BLOCK])
    names = [linear.name for linear in report.linears]
    for name in names[:3]:
        tensors = {field: reader.get(f"{name}.{field}") for field in FIELDS}
        packed = decode_linear(name, tensors, config)
        assert packed.activation == SCHEME.activation
        weight = ops.prepare_weight(packed, torch.float32)
        assert weight.kernel == "cpu_w4a8" and weight.tensors["int8"].shape[0] == 1
        packed = replace(packed, scales_NG=packed.scales_NG * torch.rand_like(packed.scales_NG))
        old = ops.prepare_weight(packed, torch.float32)
        assert old.tensors["int8"].shape[0] == packed.num_groups, "any other scales still run"
