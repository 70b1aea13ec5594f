"""Tuning a layer's codes and scales: less error, still on the grid, never worse."""

from dataclasses import replace

import pytest
import torch

from calibrate.calibration.capture import HiddenStates
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.float_model import FloatModel
from calibrate.layer import quantize_layer
from calibrate.recipe import RECIPES, Recipe
from calibrate.solvers.solving import LayerContext, Tuning
from calibrate.solvers.tuning import tune_layer
from calibrate.transforms.smoothquant import SMOOTHQUANT
from formats.errors import InputError
from formats.gguf.k_quants.grid import read_blocks
from formats.gguf.schemes import BLOCK_SCHEMES
from formats.scheme import Scheme

SCHEME = Scheme.parse("w3a16-sym-g32")


@pytest.fixture(scope="module")
def problem(tiny_model):
    """Everything that tune_layer is given: a layer, its codes by rtn, inputs and targets."""
    return problem_of(tiny_model("qwen3"), SCHEME)


def problem_of(folder, scheme):
    model = FloatModel(folder)
    runner = LayerRunner(model, model.layer_map, "cpu")
    ids = torch.randint(0, 512, (24, 32), generator=torch.Generator().manual_seed(0))
    embedding = model.get(model.layer_map.embedding)
    hidden, targets = (HiddenStates(ids, embedding, runner) for _ in range(2))
    state = model.layer(0, "cpu")
    targets.advance(runner, runner.build(0, state), 0)
    context = LayerContext(
        layer_map=model.layer_map,
        config=model.config,
        spec=scheme.weight,
        prefix=model.layer_map.prefix(0),
    )
    finished = quantize_layer(
        state,
        state,
        {},
        schemes=dict.fromkeys(model.shapes, scheme),
        recipe=RECIPES["rtn"],
        context=context,
        input_scales={},
    )
    return runner, state, finished, hidden.states_WSD, targets.states_WSD


def error(problem, finished, windows=slice(16, 24)):
    runner, state, _, inputs, targets = problem
    found = runner.run(runner.build(0, finished.apply(state)), 0, inputs[windows])
    return float((found - targets[windows]).square().mean())


def test_tuning_lowers_output_error_on_unseen_windows(problem):
    runner, state, finished, inputs, targets = problem
    tuning = Tuning(steps=60, tokens=128)
    tuned = tune_layer(runner, 0, state, finished, inputs, targets, tuning)
    assert error(problem, tuned) < 0.98 * error(problem, finished)
    for name, packed in tuned.packed.items():
        packed.check(name)
        before = finished.packed[name]
        assert packed.spec == before.spec and torch.equal(packed.zeros_NG, before.zeros_NG)
        assert packed.scales_NG.dtype == torch.float16
        assert int((packed.codes().int() - before.codes().int()).abs().max()) <= 2
    again = tune_layer(runner, 0, state, finished, inputs, targets, tuning)
    assert all(torch.equal(again.packed[n].words_NW, p.words_NW) for n, p in tuned.packed.items())


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_k_quant_tuning_stays_on_grid(docs_5m, name):
    problem = problem_of(docs_5m, BLOCK_SCHEMES[name])
    runner, state, finished, inputs, targets = problem
    tuning = Tuning(steps=80, tokens=128)
    tuned = tune_layer(runner, 0, state, finished, inputs, targets, tuning)
    assert error(problem, tuned) < 0.9 * error(problem, finished)
    moved = 0
    for linear, weight in tuned.packed.items():
        weight.check(linear)
        codes, grid = read_blocks(weight.bytes_NX, weight.spec)
        codes_before, before = read_blocks(finished.packed[linear].bytes_NX, weight.spec)
        for field in ("scales_NG", "minima_NG", "dmin_NB"):
            assert torch.equal(getattr(grid, field), getattr(before, field))
        assert (grid.d_NB / before.d_NB - 1).abs().nan_to_num().max() < 0.1
        assert int((codes.int() - codes_before.int()).abs().max()) <= 2
        moved += int((codes != codes_before).sum())
    assert moved > 100


def test_tuning_that_increases_error_is_discarded(problem):
    runner, state, finished, inputs, targets = problem
    wild = Tuning(steps=2, tokens=32, rate=50.0, scale_rate=5.0)
    assert tune_layer(runner, 0, state, finished, inputs, targets, wild) is finished


def test_tuning_after_data_dependent_transform_is_refused():
    """It would compare codes with the weights before the transform."""
    with pytest.raises(InputError, match="smoothquant"):
        Recipe(
            name="mine",
            solver=RECIPES["gptq"].solver,
            transforms=(SMOOTHQUANT,),
            corrects=True,
            tuning=Tuning(),
        )
    with pytest.raises(InputError, match="corrects"):
        replace(RECIPES["autoround"], corrects=False)
