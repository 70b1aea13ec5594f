"""GPTQ through transformers' layers: the same codes as the pipeline, and better than rounding."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers

from calibrate.any_decoder import solve_layers
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import find_recipe
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.in_memory.weights import round_to_nearest
from formats.layouts import decode_linear, layout_of, tensor_names
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve.cli import main
from qserve.command_line.tool_config import QuantizeConfig
from qserve.commands.quantize import quantize
from qserve.model.fallback.quantize import linear_names

SCHEME = Scheme.parse("w4a16-sym-g32")
SLOW = pytest.mark.exhaustive


def windows(count=6, length=48):
    return torch.randint(3, 500, (count, length), generator=torch.Generator().manual_seed(0))


def float_model(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def solved(folder, ids_WS, **settings):
    model, names = float_model(folder), linear_names(folder)
    weights = solve_layers(model, names, ids_WS, SCHEME.weight, progress=False, **settings)
    assert weights.keys() == set(names)
    return model, weights


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=SLOW)])
def test_codes_equal_pipeline(tiny_model, tmp_path, family):
    """Families of the table whose layers are of two kinds, with different masks and rotations."""
    folder, ids_WS = tiny_model(family), windows()
    data = CalibrationData(ids_WS=ids_WS, source="test", seed=0)
    target = tmp_path / "q"
    recipe = dataclasses.replace(find_recipe("gptq"), guarded=False)  # all windows are used
    quantize_checkpoint(
        folder, target, scheme=SCHEME, recipe=recipe, calibration=data, progress=False
    )
    reader = CheckpointReader(target)
    quant = QuantConfig.from_dict(reader.config[BLOCK])
    _, weights = solved(folder, ids_WS)
    same = total = 0
    for name, found in weights.items():
        fields = tensor_names(name, layout_of(quant), reader.entries)
        tensors = {field: reader.get(full) for field, full in fields.items()}
        want = decode_linear(name, tensors, quant).dequantize()
        same += int(((found.dequantize() - want).abs() < 1e-3 * want.abs().max()).sum())
        total += want.numel()
    assert same / total > 0.995, "sums in another order turn few codes"


def made(folder, kind, **changed):
    sizes = {
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2},
        **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, **changed},
    }
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["olmo", pytest.param("bitnet", marks=SLOW)])
def test_predictions_are_closer_to_float_than_rounding(tmp_path, kind):
    folder, ids_WS = made(tmp_path / kind, kind), windows(40, 64)
    model, _ = solved(folder, ids_WS[:32])
    rounded = float_model(folder)
    for name in linear_names(folder):
        weight = rounded.get_submodule(name).weight
        weight.copy_(round_to_nearest(weight, SCHEME.weight).dequantize())
    with torch.no_grad():
        want, found, other = (
            each(ids_WS[32:]).logits for each in (float_model(folder), model, rounded)
        )
    assert (found - want).norm() < (other - want).norm()


def test_linears_without_tokens_are_rounded(tiny_model, caplog):
    """For example, linears of an expert that was never chosen."""
    folder = tiny_model("qwen3")
    model, names = float_model(folder), linear_names(folder)
    name = "model.layers.2.mlp.down_proj"
    weight = model.get_submodule(name).weight.clone()
    model.model.layers[2].mlp.forward = torch.zeros_like
    weights = solve_layers(model, names, windows(2, 16), SCHEME.weight, progress=False)
    want = round_to_nearest(weight.float(), SCHEME.weight)
    assert torch.equal(weights[name].dequantize(), want.dequantize())
    assert f"{name} is rounded to nearest: no calibration token" in caplog.text


def test_layers_with_other_inputs_than_hidden_states_are_refused(tiny_model, monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    model_forward = modeling_qwen3.Qwen3Model.forward
    layer_forward = modeling_qwen3.Qwen3DecoderLayer.forward
    inside = []

    def noted(self, *inputs, **named):
        inside.append(True)
        found = model_forward(self, *inputs, **named)
        inside.clear()
        return found

    def shifted(self, hidden, *inputs, **named):
        return layer_forward(self, hidden, *inputs, **named) + float(bool(inside))

    monkeypatch.setattr(modeling_qwen3.Qwen3Model, "forward", noted)
    monkeypatch.setattr(modeling_qwen3.Qwen3DecoderLayer, "forward", shifted)
    with pytest.raises(InputError, match="read more than hidden states.*use `recipe` rtn"):
        solved(tiny_model("qwen3"), windows(2, 16), subject="x")


@pytest.mark.parametrize(
    "scheme", [("w4a16-sym", "--group-size", "32"), pytest.param(("w4a16-mxfp4",), marks=SLOW)]
)
def test_command_calibrates_on_texts(docs_5m, tmp_path, scheme):
    vocabulary = json.loads((docs_5m / "config.json").read_text())["vocab_size"]
    folder = made(tmp_path / "bitnet", "bitnet", vocab_size=vocabulary)
    for file in docs_5m.glob("token*"):
        shutil.copy(file, folder)
    arguments = ["quantize", str(folder), "--scheme", *scheme]
    few = ["--samples", "4", "--sequence-length", "64", "--device", "cpu"]
    assert main([*arguments, *few, "-o", str(tmp_path / "gptq")]) == 0
    assert main([*arguments, "--recipe", "rtn", "-o", str(tmp_path / "rtn")]) == 0
    solved_codes, rounded_codes = (CheckpointReader(tmp_path / name) for name in ("gptq", "rtn"))
    assert solved_codes.entries.keys() == rounded_codes.entries.keys()
    name = next(
        name for name in solved_codes.entries if "weight_packed" in name or "qweight" in name
    )
    assert not torch.equal(solved_codes.get(name), rounded_codes.get(name))
    for scheme, device, problem in (
        ("w8a8-fp8", "cpu", "recipe 'gptq'.*produces integer codes"),
        ("w4a16-sym", "cpu,cpu", "--device.*is quantized on one device"),
    ):
        config = QuantizeConfig(
            scheme=scheme, recipe="gptq", output=str(tmp_path / "x"), device=device
        )
        with pytest.raises(InputError, match=problem):
            quantize(str(folder), config)


@pytest.mark.parametrize("scheme", ["w4a16-mxfp4", pytest.param("w4a16-nvfp4", marks=SLOW)])
def test_fp4_weights_are_solved(tmp_path, scheme):
    folder, ids_WS = made(tmp_path / "olmo", "olmo"), windows(40, 64)
    model, spec = float_model(folder), Scheme.parse(scheme).weight
    weights = solve_layers(model, linear_names(folder), ids_WS[:32], spec, progress=False)
    rounded = float_model(folder)
    for name, found in weights.items():
        linear = rounded.get_submodule(name)
        linear.weight.copy_(round_to_nearest(linear.weight, spec).dequantize())
        assert torch.equal(model.get_submodule(name).weight, found.dequantize())
    with torch.no_grad():
        want, found, other = (
            each(ids_WS[32:]).logits for each in (float_model(folder), model, rounded)
        )
    assert (found - want).norm() < (other - want).norm()
