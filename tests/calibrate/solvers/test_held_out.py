"""Held-out windows: no solver uses them, and they decide between two solutions."""

from dataclasses import replace

import pytest
import torch

from calibrate.calibration.capture import HiddenStates, add_statistics, empty_statistics
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.statistics import MAX_HELD, HeldOut, InputStatistics
from calibrate.float_model import FloatModel
from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import RECIPES, Recipe
from calibrate.solvers import gptq, rtn
from calibrate.solvers.solving import LayerContext
from calibrate.texts.data import CalibrationData
from calibrate.transforms import smoothquant
from calibrate.transforms.awq import AWQ
from calibrate.transforms.smoothquant import SMOOTHQUANT
from formats.checkpoint import CheckpointReader
from formats.scheme import QuantSpec, Scheme

SPEC = QuantSpec(bits=4, symmetric=True, group_size=32)
IDS = torch.randint(0, 512, (9, 24), generator=torch.Generator().manual_seed(0))
DATA = CalibrationData(ids_WS=IDS, source="random", seed=0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def held_statistics(
    x_TK: torch.Tensor, held_TK: torch.Tensor, targets_TK: torch.Tensor | None = None
) -> InputStatistics:
    stats = InputStatistics(x_TK.shape[1], "cpu")
    stats.update(x_TK)
    stats.hold_out(HeldOut.of(held_TK, targets_TK))
    return stats


def test_held_out_error_equals_output_error():
    weight_NK, found_NK = normal(8, 64), normal(8, 64, seed=1)
    held_TK, targets_TK = normal(40, 64, seed=2), normal(40, 64, seed=3)
    for targets in (None, targets_TK):
        stats = held_statistics(normal(50, 64, seed=4), held_TK, targets)
        wanted = (held_TK if targets is None else targets).double() @ weight_NK.double().t()
        expected = (wanted - held_TK.double() @ found_NK.double().t()).norm() / wanted.norm()
        assert stats.held_out_error(weight_NK, found_NK) == pytest.approx(float(expected), rel=1e-5)
        scale_K = normal(64, seed=5).exp()
        stats.scale_(scale_K)  # the weights absorb the factors: the outputs stay
        found = stats.held_out_error(weight_NK * scale_K, found_NK * scale_K)
        assert found == pytest.approx(float(expected), rel=1e-4)


def test_too_few_held_out_tokens_keep_solution():
    stats = held_statistics(normal(50, 64), normal(3, 64))
    assert stats.held_out_error(normal(8, 64), normal(8, 64)) is None


def test_held_out_memory_is_bounded():
    stats = InputStatistics(4, "cpu")
    for _ in range(5):
        stats.hold_out(HeldOut.of(normal(3 * MAX_HELD, 4)))
    assert sum(len(each.inputs_TK) for each in stats._held) <= MAX_HELD


def test_held_out_windows_are_not_in_statistics(tiny_model):
    model = FloatModel(tiny_model("llama"))
    runner = LayerRunner(model, model.layer_map, "cpu")
    state = model.layer(0, "cpu")
    module = runner.build(0, state)
    embedding = model.get(model.layer_map.embedding)

    def statistics(ids_WS: torch.Tensor, every: int) -> dict[str, InputStatistics]:
        found = empty_statistics(runner, 0, state)
        hidden = HiddenStates(ids_WS, embedding, runner)
        add_statistics(found, runner, module, 0, hidden, held_every=every)
        return found

    found, fitted, held = (
        statistics(*each) for each in ((IDS, 4), (IDS[[0, 1, 2, 4, 5, 6, 8]], 0), (IDS[[3, 7]], 0))
    )
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        assert found[name].num_tokens == 7 * 24
        torch.testing.assert_close(found[name].moment_KK, fitted[name].moment_KK)
        (kept,) = found[name]._held
        torch.testing.assert_close(kept.inputs_TK.t() @ kept.inputs_TK, held[name].moment_KK)
        largest_K = torch.maximum(fitted[name].absmax_K, held[name].absmax_K)
        torch.testing.assert_close(found[name].absmax_K, largest_K)


def shifted(weight_NK, stats, spec, name):
    """A solver that is worse than rounding."""
    return rtn.solve(weight_NK * 1.3, stats, spec, name)


def test_solution_worse_than_rounding_is_replaced_by_rounding(tiny_model, tmp_path):
    def quantize(name: str, recipe: Recipe | str):
        return quantize_checkpoint(
            tiny_model("llama"),
            tmp_path / name,
            scheme=Scheme(weight=SPEC),
            recipe=recipe,
            calibration=DATA,
            progress=False,
        )

    guarded = quantize("guarded", Recipe(name="shifted", solver=shifted, guarded=True))
    own = quantize("own", Recipe(name="shifted", solver=shifted))
    rounded = quantize("rounded", "rtn")
    for ours, theirs, plain in zip(guarded.linears, own.linears, rounded.linears, strict=True):
        assert ours.relative_error == plain.relative_error < theirs.relative_error
        (note,) = ours.notes
        assert note.startswith("rounded to nearest: output error") and "with shifted" in note
        assert not theirs.notes, "a user's solver is not judged"
    assert "shifted" in guarded.to_text()


def test_better_solution_is_kept(tiny_model, tmp_path):
    report = quantize_checkpoint(
        tiny_model("llama"),
        tmp_path / "kept",
        scheme=Scheme(weight=SPEC),
        recipe=Recipe(name="mine", solver=rtn.solve_weighted, guarded=True),
        calibration=DATA,
        progress=False,
    )
    assert not all(linear.notes for linear in report.linears)
    assert all(linear.held_out_error is not None for linear in report.linears)


def nearest(weight_NK, stats, spec, name):
    return rtn.solve(weight_NK, None, spec, name)


WITH_DATA = [name for name, recipe in RECIPES.items() if recipe.needs_data]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in ("gptaq", "smoothquant") else pytest.mark.exhaustive)
        for each in WITH_DATA
    ],
)
def test_each_recipe_replaces_a_bad_solution(tiny_model, tmp_path, name):
    """The replacement is rounding to nearest after the recipe's transforms."""

    def quantize(folder: str, solver):
        return quantize_checkpoint(
            tiny_model("llama"),
            tmp_path / folder,
            scheme=Scheme(weight=SPEC),
            recipe=replace(RECIPES[name], solver=solver, tuning=None),
            calibration=DATA,
            quality_windows=0,
            progress=False,
        )

    guarded, rounded = quantize("guarded", shifted), quantize("rounded", nearest)
    for ours, plain in zip(guarded.linears, rounded.linears, strict=True):
        assert ours.relative_error == plain.relative_error
        assert any(note.startswith("rounded to nearest: output error") for note in ours.notes)
    assert f"on held-out windows, with {name}" in guarded.to_text()


@pytest.mark.parametrize("transform", [AWQ, SMOOTHQUANT], ids=lambda transform: transform.name)
def test_factors_worse_on_held_out_tokens_are_dropped(tiny_model, transform, monkeypatch):
    """The held-out tokens have other large channels than the tokens that choose the factors."""

    def large(width: int) -> torch.Tensor:
        return torch.where(torch.arange(width) < width // 8, 30.0, 1.0)

    # SmoothQuant's own factors allow for the held-out tokens' ranges.
    monkeypatch.setattr(smoothquant, "factors", lambda weights, *_: large(len(weights[0][0])))
    reader = CheckpointReader(tiny_model("llama"))
    layer_map = find_layer_map(reader.config)
    state = {n: reader.get(f"model.layers.0.{n}") for n in reader.children("model.layers.0")}
    context = LayerContext(layer_map=layer_map, config=reader.config, spec=SPEC, activation_bits=8)
    (first, *_) = context.layer_map.inputs(context.config, context.layer)
    for like_fitted in (True, False):
        statistics = {}
        for group in context.layer_map.inputs(context.config, context.layer):
            width = state[f"{group[0]}.weight"].shape[1]
            large_K = large(width)
            held_K = large_K if like_fitted else large_K.flip(0)
            stats = held_statistics(
                normal(200, width) * large_K, normal(80, width, seed=1) * held_K
            )
            statistics |= dict.fromkeys(group, stats)
        changed = transform.on_statistics(state, statistics, context)
        norm = "input_layernorm.weight"
        notes = statistics[first[0]].notes
        if like_fitted:
            assert not torch.equal(changed[norm], state[norm]) and not notes
        else:
            assert norm not in changed
            assert notes == [
                f"without {transform.name} factors, which enlarge the output error on held-out"
                " windows"
            ]


def test_recipes_with_data_use_held_out_check():
    for name, recipe in RECIPES.items():
        assert recipe.guarded == recipe.needs_data, name


def test_correction_worse_on_held_out_tokens_is_dropped():
    """Either the calibration tokens drift and the held-out ones do not, or the reverse."""
    x_TK = normal(400, 64) @ normal(64, 64, seed=1)
    weight_NK, drift_KK = normal(16, 64, seed=2), 0.3 * normal(64, 64, seed=3)
    held_TK = normal(80, 64, seed=4) @ normal(64, 64, seed=1)
    stats = InputStatistics(64, "cpu")
    stats.update(x_TK, x_TK + x_TK @ drift_KK)
    moved = gptq.solve_corrected(weight_NK, stats, SPEC, "x").dequantize()
    plain = gptq.solve(weight_NK, stats, SPEC, "x").dequantize()
    assert not torch.equal(moved, plain)
    for targets_TK, expected in ((held_TK, plain), (held_TK + held_TK @ drift_KK, moved)):
        stats = InputStatistics(64, "cpu")
        stats.update(x_TK, x_TK + x_TK @ drift_KK)
        stats.hold_out(HeldOut.of(held_TK, targets_TK))
        found = gptq.solve_corrected(weight_NK, stats, SPEC, "x").dequantize()
        assert torch.equal(found, expected)


def test_damping_increases_with_few_distinct_tokens():
    """A text that repeats its words has few distinct tokens, which a solver overfits."""
    mixing_KK = normal(256, 256, seed=1) * torch.linspace(0.02, 1, 256)
    weight_NK = normal(64, 256, seed=2)
    fresh_TK = normal(4000, 256, seed=3) @ mixing_KK

    def error(least: float | None) -> float:
        stats = InputStatistics(256, "cpu")
        words_TK = normal(160, 256, seed=4).repeat(8, 1)
        stats.update((words_TK + 0.1 * normal(8 * 160, 256, seed=5)) @ mixing_KK)
        if least is not None:
            order, length = gptq.DEFAULT_ORDER, 32
            key = f"gptq {order.name} {length}"
            stats.cache[key] = gptq.factor(stats.hessian_KK, "x", order, length, least)
        found_NK = gptq.solve(weight_NK, stats, SPEC, "x").dequantize()
        return float(((weight_NK - found_NK) @ fresh_TK.t()).norm())

    assert error(None) < 0.9 * error(gptq.DAMPING[0])
    many = InputStatistics(256, "cpu")
    many.update(normal(100 * 256, 256))
    assert gptq.min_damping(many) == gptq.DAMPING[0]
