"""`qserve bench quantize` on shapes with few channels."""

import json

import pytest

from calibrate import bench
from formats.errors import InputError

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
SETTINGS = {
    "layers": 2,
    "samples": 2,
    "sequence_length": 32,
    "recipe": "gptq",
    "scheme": "w4a16-sym",
    "device": "cpu",
    "gpu_memory": None,
    "output_json": None,
}


@pytest.mark.parametrize("shape", bench.CONFIGS)
def test_layers_of_each_shape_are_quantized(shape, monkeypatch, tmp_path, capsys):
    config = bench.CONFIGS[shape] | SMALL
    if "num_experts" in config:
        config |= EXPERTS
    monkeypatch.setitem(bench.CONFIGS, shape, config)
    found = tmp_path / "result.json"
    assert bench.bench_quantize(**SETTINGS | {"shape": shape, "output_json": str(found)}) == 0
    result = json.loads(found.read_text())
    assert result["shape"] == shape and result["layers"] == 2
    first, each = result["seconds_of_first_layer"], result["seconds_per_layer"]
    assert first > 0
    assert result["projected_seconds"] == pytest.approx(5 * each + max(0, first - each))
    assert f"2 layers of {shape}, gptq, 2 x 32 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": 49}, "has 48 layers.*use at most 48"),
        ({"gpu_memory": 40.0}, "--gpu-memory.*not a GPU.*remove"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changed, said):
    with pytest.raises(InputError, match=said):
        bench.bench_quantize(**SETTINGS | {"shape": "qwen3-30b-a3b"} | changed)
