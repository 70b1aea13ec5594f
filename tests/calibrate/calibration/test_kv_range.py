"""KV-cache scales: from the keys and values that a server caches, the same bytes on a resume."""

import json

import pytest
import torch
from transformers import DynamicCache

from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import Recipe
from calibrate.solvers import gptq, rtn
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from tests.formats.inspection.findings import of_weights

IDS = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
DATA = CalibrationData(ids_WS=IDS, source="random ids", seed=0)
OPTIONS = {
    "scheme": Scheme.parse("w4a16-sym-g32"),
    "output_format": "compressed-tensors",
    "calibration": DATA,
    "progress": False,
}


def scales(folder):
    reader = CheckpointReader(folder)
    return {n: reader.get(n) for n in reader.entries if n.endswith(("k_scale", "v_scale"))}


@pytest.mark.parametrize(("kv_cache", "largest"), [("int8", 127), ("fp8", 448)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kv_scales_equal_transformers_cache(
    tiny_model, transformers_model, tmp_path, family, kv_cache, largest
):
    """Judged by the cache of the quantized model in transformers, on the calibration data."""
    source = tiny_model(family)
    folder = tmp_path / "out"
    report = quantize_checkpoint(source, folder, recipe="gptq", kv_cache=kv_cache, **OPTIONS)
    plain = quantize_checkpoint(
        source, tmp_path / "gptq", recipe="gptq", **{**OPTIONS, "output_format": "gptq"}
    )
    assert plain.kv_cache is None and plain.kv_scales == {}
    cache = DynamicCache()
    with torch.no_grad():
        transformers_model(tmp_path / "gptq")(IDS, past_key_values=cache)
    found = scales(folder)
    assert len(found) == 2 * len(cache.layers) == 6
    for number, layer in enumerate(cache.layers):
        for kind, states in (("k_scale", layer.keys), ("v_scale", layer.values)):
            name = f"model.layers.{number}.self_attn.{kind}"
            scale = found[name]
            assert scale.dtype == torch.float32 and scale.shape == (1,)
            assert float(scale) == pytest.approx(float(states.abs().max()) / largest, rel=1e-4)
            assert report.kv_scales[name] == pytest.approx(float(scale))
    assert f"{kv_cache} KV cache: k_scale " in report.to_text()
    page = (folder / "quantization_report.html").read_text()
    assert f"Scales of the {kv_cache} KV cache per layer" in page and page.count("<svg") == 7
    assert of_weights(inspect_checkpoint(folder)) == ()
    config = json.loads((folder / "config.json").read_text())[BLOCK]["kv_cache_scheme"]
    assert config["type"] == ("int" if kv_cache == "int8" else "float")


def test_kv_scales_are_per_head(tiny_model, transformers_model, tmp_path):
    source, folder = tiny_model("qwen3"), tmp_path / "out"
    quantize_checkpoint(source, folder, recipe="gptq", kv_cache="fp8", kv_per_head=True, **OPTIONS)
    quantize_checkpoint(
        source, tmp_path / "gptq", recipe="gptq", **{**OPTIONS, "output_format": "gptq"}
    )
    cache = DynamicCache()
    with torch.no_grad():
        transformers_model(tmp_path / "gptq")(IDS, past_key_values=cache)
    found = scales(folder)
    for number, layer in enumerate(cache.layers):
        for kind, states in (("k_scale", layer.keys), ("v_scale", layer.values)):
            scale = found[f"model.layers.{number}.self_attn.{kind}"]
            want = states.abs().amax((0, 2, 3)) / 448
            assert scale.dtype == torch.float32 and scale.shape == (len(want), 1, 1)
            assert len(want) > 1 and torch.allclose(scale.flatten(), want, rtol=1e-4)
    assert of_weights(inspect_checkpoint(folder)) == ()


@pytest.mark.parametrize("family", ["phi3", "gemma3", "mixtral", "qwen3_moe", "gemma4_shared"])
def test_kv_scales_for_every_layer_of_every_family(tiny_model, tmp_path, family):
    quantize_checkpoint(tiny_model(family), tmp_path / "out", kv_cache="fp8", **OPTIONS)
    found = scales(tmp_path / "out")
    assert len(found) == 6 and all(float(scale) > 1e-6 for scale in found.values())
    assert len(set(map(float, found.values()))) == 6
    assert of_weights(inspect_checkpoint(tmp_path / "out")) == ()


def test_resumed_run_keeps_scales_and_detects_changed_cache_type(tiny_model, tmp_path):
    stopping = False

    def run(target, **changes):
        recipe = Recipe(name="mine", solver=solve, version="1")
        options = {**OPTIONS, "kv_cache": "int8", **changes}
        return quantize_checkpoint(tiny_model("llama"), tmp_path / target, recipe=recipe, **options)

    def solve(weight, stats, spec, name):
        if stopping and "layers.2" in name:
            raise KeyboardInterrupt
        return gptq.solve(weight, stats, spec, name)

    run("whole")
    stopping = True
    with pytest.raises(KeyboardInterrupt):
        run("out")
    stopping = False
    with pytest.raises(InputError, match="unfinished run with kv_cache 'int8'; this run has 'fp8'"):
        run("out", kv_cache="fp8")
    run("out")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_format": "gptq"}, "KV cache int8: gptq cannot store.*compressed-tensors"),
        ({"kv_cache": "int4"}, "KV cache 'int4': unknown.*int8, fp8"),
    ],
)
def test_unwritable_kv_scales_are_refused_early(tiny_model, tmp_path, options, message):
    options = {**OPTIONS, "kv_cache": "int8", **options}
    with pytest.raises(InputError, match=message):
        quantize_checkpoint(tiny_model("llama"), tmp_path / "out", recipe="rtn", **options)
    assert list(tmp_path.iterdir()) == []


def test_reported_perplexity_includes_the_rounding_of_the_cache(docs_5m, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "Ownership is a set of rules. " * 160}))
    data = {"samples": 2, "sequence_length": 64, "calibration": None, "eval_text": str(text)}
    options = {**OPTIONS, "scheme": Scheme.parse("w8a8"), **data}
    recipe = Recipe(name="mine", solver=rtn.solve)

    def after(target, **changes):
        report = quantize_checkpoint(
            docs_5m, tmp_path / target, recipe=recipe, **{**options, **changes}
        )
        return report.quality["perplexity"]

    plain, fine = after("a"), after("b", kv_cache="int8")
    assert 0 < abs(fine / plain - 1) < 0.01
