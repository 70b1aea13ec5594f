"""Mixed bits: the choice is optimal, and a run stays within its budget."""

import itertools
import json
import random

import pytest
import torch

from calibrate.mixed_bits import CANDIDATE_BITS, Choice, choose, size_per_weight
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.errors import InputError, SchemeError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import QuantSpec, Scheme
from tests.formats.inspection.findings import of_weights

G128 = QuantSpec(bits=4, symmetric=True, group_size=128)
ASYMMETRIC = QuantSpec(bits=4, symmetric=False, group_size=64)


def choices_of(seed):
    rng = random.Random(seed)
    found = []
    for number in range(4):
        costs, cost = {}, rng.uniform(0.5, 2.0)
        for bits in CANDIDATE_BITS:
            costs[bits] = cost
            cost *= rng.uniform(0.1, 0.6)
        weights = rng.choice([4096, 8192, 12288, 49152])
        found.append(Choice(names=(f"m{number}",), weights=weights, costs=costs))
    return found


@pytest.mark.parametrize("spec", [G128, ASYMMETRIC])
@pytest.mark.parametrize("bits", [2.7, 3.5, 4.125, 6.0])
def test_assignment_is_optimal_within_budget(spec, bits):
    for seed in range(4):
        choices = choices_of(seed)
        total = sum(choice.weights for choice in choices)

        def size(own, choices=choices):
            return sum(
                c.weights * size_per_weight(spec, b) for c, b in zip(choices, own, strict=True)
            )

        def cost(own, choices=choices):
            return sum(c.costs[b] for c, b in zip(choices, own, strict=True))

        every = itertools.product(CANDIDATE_BITS, repeat=len(choices))
        best = min((own for own in every if size(own) <= bits * total), key=cost)
        found = choose(choices, spec, bits)
        assert size(found) <= bits * total * (1 + 1e-9)
        assert cost(found) == pytest.approx(cost(best))


def test_budget_below_minimum_bits_is_refused():
    with pytest.raises(
        SchemeError, match="1.9 bits per weight: is too few: even 2 bits take 2.125"
    ):
        choose(choices_of(0), G128, 1.9)


def test_run_stays_within_budget_and_keeps_fused_bits_equal(tiny_model, tmp_path):
    ids = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
    data = CalibrationData(ids_WS=ids, source="test", seed=0)
    report = quantize_checkpoint(
        tiny_model("qwen3"),
        tmp_path / "out",
        scheme=Scheme.parse("w4a16-sym-g32"),
        recipe="rtn",
        bits=4.0,
        overrides=[("layers.0.mlp.down_proj", Scheme.parse("w8a16-sym-g32"))],
        calibration=data,
        progress=False,
        settings={"scheme": "w4a16-sym-g32", "bits": 4.0},
    )
    schemes = {linear.name: linear.scheme for linear in report.linears}
    assert schemes["model.layers.0.mlp.down_proj"] == "w8a16-sym-g32"
    free = [x for x in report.linears if x.name != "model.layers.0.mlp.down_proj"]
    weights = sum(x.shape[0] * x.shape[1] for x in free)
    assert 8 * sum(x.num_bytes - 16 for x in free) / weights <= 4.0
    assert len(set(schemes.values())) > 2
    for layer in range(3):
        attention = [schemes[f"model.layers.{layer}.self_attn.{n}_proj"] for n in "qkv"]
        assert len(set(attention)) == 1
    found = inspect_checkpoint(tmp_path / "out")
    assert of_weights(found) == () and found.scheme.startswith("mixed: ")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "4.0 bits on the mean" in card and "| vLLM | yes | `vllm serve out`" in card
    assert "bits: 4.0" in (tmp_path / "out" / "quantization_recipe.yaml").read_text()
    assert json.loads((tmp_path / "out" / "quantization_report.json").read_text())["linears"]


def test_experts_of_a_layer_have_the_same_bits(tiny_model, tmp_path):
    """Servers keep the codes of all experts of a layer in one tensor."""
    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        tiny_model("qwen3_moe"),
        tmp_path / "out",
        scheme=Scheme.parse("w4a16-sym-g32"),
        recipe="rtn",
        bits=4.5,
        calibration=CalibrationData(ids_WS=ids, source="test", seed=0),
        progress=False,
    )
    found = inspect_checkpoint(tmp_path / "out")
    by_layer = {}
    for linear in found.linears:
        if ".experts." in linear.name:
            by_layer.setdefault(linear.name.split(".experts.")[0], set()).add(linear.scheme)
    assert by_layer and all(len(schemes) == 1 for schemes in by_layer.values())
    assert found.scheme.startswith("mixed: ")
    assert {v.program: v.answer for v in found.loads_in}["vLLM"] == "yes"


def test_scheme_without_other_bit_widths_is_refused(tiny_model, tmp_path):
    with pytest.raises(InputError, match="w8a8.*fixed number of bits"):
        quantize_checkpoint(
            tiny_model("qwen3"),
            tmp_path / "out",
            scheme=Scheme.parse("w8a8"),
            recipe="rtn",
            bits=4.0,
            calibration=CalibrationData(ids_WS=torch.zeros(2, 8).long(), source="test", seed=0),
            progress=False,
        )
