"""Layer maps of families whose layers differ: linears by input, and where factors move."""

import json

import pytest
import torch

from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from tests.tiny_families import DELTA

QWEN35 = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 3, **DELTA}
NET = "linear_attn.in_proj"


def test_delta_net_linears_share_input_with_gates():
    names = find_layer_map(QWEN35)
    first, out, gate_up, down = names.inputs(QWEN35, 0)
    assert first == (f"{NET}_qkv", f"{NET}_z", f"{NET}_b", f"{NET}_a")
    assert (out, down) == (("linear_attn.out_proj",), ("mlp.down_proj",))
    assert names.inputs(QWEN35, 1)[0] == tuple(f"self_attn.{x}_proj" for x in "qkv")
    assert set(names.kept_in_float(QWEN35)) == {
        f"model.layers.{layer}.{NET}_{gate}" for layer in (0, 2) for gate in "ab"
    }


def test_layer_types_equal_transformers():
    """By layer_types, or each fourth has attention, or each n-th."""
    without = {k: v for k, v in QWEN35.items() if k != "layer_types"} | {"num_hidden_layers": 8}
    names = find_layer_map(without)
    kinds = [names.has_state(without, layer) for layer in range(8)]
    assert kinds == [True, True, True, False] * 2
    each_second = {**without, "full_attention_interval": 2}
    assert [names.has_state(each_second, layer) for layer in range(4)] == [True, False] * 2


def test_required_tensors_equal_file(tiny_model):
    folder = tiny_model("qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    names = find_layer_map(config)
    assert set(names.required_tensors(config)) == set(CheckpointReader(folder).entries)
    assert [pair.kind for pair in names.scale_pairs(config, 0)] == ["norm", "norm", "up"]
    kinds = [pair.kind for pair in names.scale_pairs(config, 1)]
    assert kinds == ["norm", "values", "norm", "up"]


def test_awq_factors_preserve_model_output(tiny_model, tmp_path):
    """AWQ scales norms before nets; gates, which stay in float, compensate."""
    from calibrate.float_model import FloatModel

    folder, target = tiny_model("qwen3_5"), tmp_path / "awq"
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        folder,
        target,
        scheme=Scheme.parse("w3a16-sym-g32"),
        recipe="awq",
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    before, after = FloatModel(folder), CheckpointReader(target)
    gate, norm = f"model.layers.0.{NET}_b.weight", "model.layers.0.input_layernorm.weight"
    old, new = before.get(gate), after.get(gate).float()
    gain = (1 + after.get(norm).float()) / (1 + before.get(norm))
    assert not torch.allclose(gain, torch.ones_like(gain)), "nothing moved"
    torch.testing.assert_close(new * gain, old, rtol=1e-4, atol=1e-6)
    config = QuantConfig.from_dict(after.config[BLOCK])
    assert config.scheme_for(gate.removesuffix(".weight")) is None


def test_rotation_is_refused(tiny_model, tmp_path):
    with pytest.raises(InputError, match="norms, routers or gates.*rotations cannot be folded"):
        quantize_checkpoint(
            tiny_model("qwen3_5"),
            tmp_path / "x",
            scheme=Scheme.parse("w4a16-sym-g32"),
            recipe="rotate",
            calibration=CalibrationData(ids_WS=torch.ones(1, 8).long(), source="test", seed=0),
            progress=False,
        )


def test_factors_pass_only_through_relu():
    config = {"architectures": ["OPTForCausalLM"], "num_hidden_layers": 1}
    kinds = {
        activation: [
            pair.kind
            for pair in find_layer_map(config).scale_pairs(
                {**config, "activation_function": activation}, 0
            )
        ]
        for activation in ("relu", "gelu")
    }
    assert kinds == {"relu": ["norm", "values", "norm", "up"], "gelu": ["norm", "values", "norm"]}


def test_parallel_block_shares_one_input():
    config = {"architectures": ["CohereForCausalLM"], "num_hidden_layers": 1}
    names = find_layer_map(config)
    first, out, down = names.inputs(config, 0)
    assert [name.rpartition(".")[2] for name in first] == [
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    ]
    assert (out, down) == (("self_attn.o_proj",), ("mlp.down_proj",))
    assert names.scale_pairs(config, 0)[0].linears == first
