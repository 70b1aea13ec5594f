"""`inspect` reads every float value: NaN and infinity are errors in any tensor."""

import math

import pytest
import torch

from formats.inspection import values as inspect_values
from formats.inspection.inspect import inspect_checkpoint

NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "place"),
    [(NORM, (63,)), (EMBEDDING, (39, 2)), ("lm_head.weight", (0, 0)), ("model.norm.weight", (0,))],
)
def test_nan_or_inf_value_is_reported_with_position(
    gptq_model, write_folder, name, place, dtype, value
):
    tensors, config = gptq_model
    tensors[name] = tensors[name].to(dtype)
    tensors[name][place] = value
    (problem,) = inspect_checkpoint(write_folder(tensors, config)).problems
    assert (problem.severity, problem.subject) == ("error", name)
    assert problem.text == (
        f"1 of {tensors[name].numel()} values are NaN or infinite, the first at {list(place)}"
    )


def test_nan_in_bias_and_float_linear_are_reported(float_model, write_folder):
    tensors, config = float_model
    config["attention_bias"] = True
    for layer in (0, 1):
        for local, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            tensors[f"model.layers.{layer}.self_attn.{local}_proj.bias"] = torch.ones(size)
    tensors[BIAS][[3, 5]] = math.inf
    down = "model.layers.1.mlp.down_proj.weight"
    tensors[down][10, 1] = math.nan
    found = inspect_checkpoint(write_folder(tensors, config))
    assert {p.subject: p.text.rpartition(" at ")[2] for p in found.problems} == {
        BIAS: "[3]",
        down: "[10, 1]",
    }
    assert {verdict.answer for verdict in found.loads_in} == {"no"}


@pytest.mark.parametrize("block_bytes", [2, 128, 130, 5120, 2**25])
def test_value_scan_blocks_cover_tensor(gptq_model, write_folder, monkeypatch, block_bytes):
    monkeypatch.setattr(inspect_values, "BLOCK_BYTES", block_bytes)
    tensors, config = gptq_model
    tensors[EMBEDDING][[0, 17, 39], [0, 63, 63]] = math.nan
    (problem,) = inspect_checkpoint(write_folder(tensors, config)).problems
    assert "3 of 2560 values are NaN or infinite, the first at [0, 0]" in problem.text


def test_empty_and_scalar_tensors_are_scanned(gptq_model, write_folder):
    tensors, config = gptq_model
    tensors["extra.empty"] = torch.zeros(0, 4)
    tensors["extra.number"] = torch.tensor(math.nan)
    texts = [p.text for p in inspect_checkpoint(write_folder(tensors, config)).problems]
    assert "1 of 1 values are NaN or infinite, the first at []" in texts


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_float8_code_is_reported(model, write_folder, byte):
    state, config = model("compressed-tensors", "w8a8-fp8")
    name = "model.layers.0.mlp.up_proj.weight"
    state[name].view(torch.uint8)[95, 63] = byte
    (problem,) = inspect_checkpoint(write_folder(state, config)).problems
    assert problem.subject == name
    assert "1 of 6144 values are NaN or infinite, the first at [95, 63]" in problem.text


def test_invalid_scales_give_one_problem_each(gptq_model, write_folder):
    tensors, config = gptq_model
    tensors["model.layers.0.self_attn.q_proj.scales"][0, 0] = math.nan
    assert len(inspect_checkpoint(write_folder(tensors, config)).problems) == 1
