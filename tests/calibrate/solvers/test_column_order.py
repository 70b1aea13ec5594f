"""Column orders of GPTQ: groups stay whole or are regrouped, and scales fit their weights."""

import json
from dataclasses import replace

import pytest
import torch

from calibrate.calibration.statistics import InputStatistics
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import RECIPES, Recipe
from calibrate.solvers import gptq
from calibrate.solvers.column_order import ORDERS, blocks, by_group, by_input
from calibrate.solvers.solving import Tuning
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.numerics import affine
from formats.quant_config import BLOCK
from formats.scheme import QuantSpec, Scheme
from tests.formats.inspection.findings import of_weights

SPEC = QuantSpec(bits=3, symmetric=True, group_size=32)
IDS = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
OPTIONS = {
    "scheme": Scheme.parse("w4a16-sym-g32"),
    "calibration": CalibrationData(ids_WS=IDS, source="random ids", seed=0),
    "progress": False,
}


def problem(width=160, outputs=48, seed=0):
    """A weight, and the statistics of inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    sizes = torch.logspace(-1, 1, width)[torch.randperm(width, generator=generator)]
    stats = InputStatistics(width, "cpu", "q")
    stats.update(torch.randn(20_000, width, generator=generator) @ mix * sizes)
    return torch.randn(outputs, width, generator=generator), stats


def test_column_order_keeps_groups_together():
    diagonal = torch.rand(96, generator=torch.Generator().manual_seed(0))
    order = by_group(diagonal, 32)
    groups = (order // 32).view(3, 32)
    assert (groups == groups[:, :1]).all() and sorted(order.tolist()) == list(range(96))
    sums = diagonal.view(3, 32).sum(1)[groups[:, 0]]
    assert (sums.diff() <= 0).all()
    assert all((part.diff() <= 0).all() for part in diagonal[order].view(3, 32))
    assert torch.equal(by_group(diagonal, 96), by_input(diagonal, 96))


def test_gptq_blocks_end_at_late_scale_groups():
    assert list(blocks(96, 32, True)) == [(0, 32), (32, 64), (64, 96)]
    assert list(blocks(400, 200, True)) == [(0, 128), (128, 200), (200, 328), (328, 400)]
    assert list(blocks(300, 32, False)) == [(0, 128), (128, 256), (256, 300)]


@pytest.mark.parametrize("group_size", [32, 160, -1])
@pytest.mark.parametrize("name", ORDERS)
def test_output_error_is_below_rounding(name, group_size):
    weight, stats = problem()
    spec = QuantSpec(bits=3, symmetric=True, group_size=group_size)
    packed = gptq.solve(weight, stats, spec, "q", order=ORDERS[name])
    scales, zeros = affine.choose_scales(weight, spec, "q", importance_K=stats.importance_K)
    rounded = affine.dequantize(affine.quantize(weight, scales, zeros, spec), scales, zeros)
    found = stats.relative_output_error(weight, packed.dequantize())
    assert found < 0.8 * stats.relative_output_error(weight, rounded)


def test_coarse_grid_keeps_better_of_two_column_orders(monkeypatch):
    weight, stats = problem()
    spec = QuantSpec(bits=2, symmetric=True, group_size=32)

    def error(order):
        packed = gptq.solve(weight, stats, spec, "q", order=order)
        assert packed.input_order is None
        return float(stats.squared_error(weight - packed.dequantize()).sum())

    static, group_aware = error(ORDERS["static"]), error(ORDERS["group-aware"])
    assert error(None) == min(static, group_aware) < max(static, group_aware)
    swapped = {"static": ORDERS["group-aware"], "group-aware": ORDERS["static"]}
    monkeypatch.setattr(gptq, "ORDERS", swapped)
    assert error(None) == min(static, group_aware)


def test_late_group_scales_follow_corrected_weights():
    """Without corrections from other columns, a scale chosen late equals the one chosen first."""
    weight, _ = problem()
    stats = InputStatistics(160, "cpu", "q")
    stats.update(torch.diag(torch.linspace(1, 2, 160)))
    late = gptq.solve(weight, stats, SPEC, "q", order=ORDERS["group-aware"])
    early = gptq.solve(weight, stats, SPEC, "q", order=ORDERS["static"])
    assert torch.equal(late.scales_NG, early.scales_NG)
    assert torch.equal(late.codes(), early.codes())
    weight, stats = problem()
    late = gptq.solve(weight, stats, SPEC, "q", order=ORDERS["group-aware"])
    early = gptq.solve(weight, stats, SPEC, "q", order=ORDERS["static"])
    assert not torch.equal(late.scales_NG, early.scales_NG)


def test_act_order_writes_g_idx_and_reports_readers(tiny_model, tmp_path):
    source, folder = tiny_model("llama"), tmp_path / "out"
    report = quantize_checkpoint(source, folder, recipe="gptaq", act_order=True, **OPTIONS)
    assert report.recipe == "gptaq, act-order" and report.format == "gptq"
    assert any("vLLM 0.33 refuses it" in warning for warning in report.warnings)
    block = json.loads((folder / "config.json").read_text())[BLOCK]
    assert block["desc_act"] is True
    reader = CheckpointReader(folder)
    indices = {n: reader.get(n) for n in reader.entries if n.endswith("g_idx")}
    in_order = [bool((index.diff() >= 0).all()) for index in indices.values()]
    assert len(indices) == 21 and not all(in_order)
    assert all((index.bincount() == 32).all() for index in indices.values())
    # those that servers multiply as one share an order
    first = "model.layers.0.self_attn"
    assert torch.equal(indices[f"{first}.q_proj.g_idx"], indices[f"{first}.v_proj.g_idx"])
    found = inspect_checkpoint(folder)
    assert [problem.severity for problem in of_weights(found)] == ["warning"]
    answers = {verdict.program: verdict.answer for verdict in found.loads_in}
    assert answers == {
        "this project": "slow",
        "vLLM": "no",
        "SGLang": "slow",
        "transformers": "yes",
    }


def test_act_order_without_reordered_groups_is_not_reported(tiny_model, tmp_path):
    options = {**OPTIONS, "scheme": Scheme.parse("w4a16-sym-channel")}
    report = quantize_checkpoint(
        tiny_model("llama"), tmp_path / "out", recipe="gptq", act_order=True, **options
    )
    assert any("written without act-order" in warning for warning in report.warnings)
    assert not any("vLLM" in warning for warning in report.warnings)
    for name in ("config.json", "quantize_config.json"):
        block = json.loads((tmp_path / "out" / name).read_text())
        assert block.get(BLOCK, block)["desc_act"] is False
    assert of_weights(inspect_checkpoint(tmp_path / "out")) == ()


def test_resumed_run_keeps_column_orders(tiny_model, tmp_path, monkeypatch):
    source = tiny_model("llama")
    recipe = replace(RECIPES["autoround"], tuning=Tuning(steps=2, tokens=40), version="1")
    whole = {"recipe": recipe, "act_order": True, **OPTIONS}
    quantize_checkpoint(source, tmp_path / "whole", **whole)
    real, seen = gptq.round_columns, []

    def stopping(*arguments, **options):
        seen.append(1)
        if len(seen) == 20:  # a layer takes 14: with the correction, and without
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(gptq, "round_columns", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", **whole)
    quantize_checkpoint(source, tmp_path / "out", **whole)
    assert len(seen) < 20 + 42
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("out", "whole"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_format": "awq"}, "act-order: cannot be stored as awq .write gptq"),
        ({"recipe": "rtn"}, "recipe 'rtn': does not support act-order.*use gptq, gptaq"),
        ({"kv_cache": "int8"}, "gptq cannot store its scales"),
    ],
)
def test_unsupported_act_order_is_refused_early(tiny_model, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        quantize_checkpoint(
            tiny_model("llama"),
            tmp_path / "out",
            **{"recipe": "gptq", **OPTIONS, **options},
            act_order=True,
        )
    assert list(tmp_path.iterdir()) == []


def test_solver_with_unrequested_act_order_is_refused(tiny_model, tmp_path):
    def solve(weight, stats, spec, name):
        return gptq.solve(weight, stats, spec, name, order=ORDERS["act-order"])

    with pytest.raises(InputError, match="not grouped in order"):
        quantize_checkpoint(
            tiny_model("llama"),
            tmp_path / "out",
            recipe=Recipe(name="mine", solver=solve),
            **OPTIONS,
        )
