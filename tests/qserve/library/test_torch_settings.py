"""LLM, quantize_checkpoint and save_quantized in programs that changed torch's defaults."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from calibrate import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.numerics.torch_state import torch_defaults
from qkernels import QuantLinear
from qserve import LLM, PoolingParams, SamplingParams, save_quantized

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=1)


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "default device": partial(torch.device, "meta"),  # like "cuda", on any machine
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
}
ANY_SETTING = pytest.mark.parametrize("setting", SETTINGS)


def answers(model):
    """Texts, log probabilities, logits and a vector of a new engine."""
    llm = LLM(model, device="cpu", num_gpu_blocks_override=32, admission="fits")
    try:
        (output,) = llm.generate("Ownership in Rust", GREEDY, use_tqdm=False)[0].outputs
        values = [list(each.values())[0].logprob for each in output.logprobs]
        (vector,) = llm.encode(["a text"], PoolingParams(), pooling_task="embed", use_tqdm=False)
        logits = llm.logits([5, 6, 7])
        return output.text, values, vector.outputs.data.tolist(), logits.cpu().tolist()
    finally:
        llm.close()


@pytest.fixture(scope="module")
def plain_answers(quantized_5m):
    return answers(quantized_5m)


@ANY_SETTING
def test_engine_answers_the_same_with_any_setting(quantized_5m, plain_answers, setting):
    with SETTINGS[setting]():
        assert answers(quantized_5m) == plain_answers


def written(folder):
    reader = CheckpointReader(folder)
    return {name: bytes(reader.get(name).view(torch.uint8).numpy()) for name in reader.entries}


def quantized(model, folder, recipe):
    ids_WS = torch.arange(64, device="cpu").view(2, 32)
    data = CalibrationData(ids_WS=ids_WS, source="numbers", seed=0)
    quantize_checkpoint(
        *(model, folder),
        scheme="w4a16-sym-g32",
        recipe=recipe,
        overrides=[("layers.0.mlp.down_proj", "w8a16-sym-g32")],
        calibration=data,
        progress=False,
    )
    return written(folder)


@pytest.fixture(scope="module")
def plain_files(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return {
        recipe: quantized(tiny_model("llama"), folder / recipe, recipe)
        for recipe in ("rtn", "gptq")
    }


@ANY_SETTING
@pytest.mark.parametrize("recipe", ["rtn", "gptq"])
def test_quantized_files_are_the_same_with_any_setting(
    tiny_model, tmp_path, plain_files, recipe, setting
):
    with SETTINGS[setting]():
        quantized(tiny_model("llama"), tmp_path / "out", recipe)
    assert written(tmp_path / "out") == plain_files[recipe]


@ANY_SETTING
def test_saved_files_are_the_same_with_any_setting(tiny_model, tmp_path, setting):
    model = tiny_model("llama")
    reader = CheckpointReader(model)
    layers = {
        name.removesuffix(".weight"): QuantLinear.from_float(reader.get(name), "w4a16-asym-g32")
        for name in reader.entries
        if name.endswith("_proj.weight")
    }
    save_quantized(tmp_path / "plain", model, layers)
    with SETTINGS[setting]():
        save_quantized(tmp_path / "own", model, layers)
    assert written(tmp_path / "own") == written(tmp_path / "plain")


def test_settings_return_after_an_error():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(ZeroDivisionError), torch_defaults():
                assert torch.ones(1).device.type == "cpu"
                assert torch.get_default_dtype() == torch.float32
                assert not torch.is_autocast_enabled("cpu")
                raise ZeroDivisionError
            assert torch.ones(1).is_meta and torch.is_autocast_enabled("cpu")
            assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
