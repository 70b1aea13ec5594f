"""Quantizing models whose weights are quantized: as if their floats had been given."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.dequantize import dequantize_checkpoint
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.qserve.model.variants import edited

IDS = torch.randint(3, 512, (8, 24), generator=torch.Generator().manual_seed(1))


def quantize(source, target, scheme, **settings):
    quantize_checkpoint(
        source,
        target,
        scheme=Scheme.parse(scheme),
        calibration=CalibrationData(ids_WS=IDS, source="random", seed=0),
        progress=False,
        quality_windows=0,
        **settings,
    )
    return target


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def mxfp4(folder, target):
    """A model whose experts are random MXFP4 blocks, as gpt-oss is published."""
    generator = torch.Generator().manual_seed(0)

    def pack(state):
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            E, K, N = state.pop(name).shape
            blocks = torch.randint(256, (E, N, K // 32, 16), generator=generator)
            scales = torch.randint(118, 122, (E, N, K // 32), generator=generator)
            state[f"{name}_blocks"] = blocks.to(torch.uint8)
            state[f"{name}_scales"] = scales.to(torch.uint8)

    def config(value):
        value["quantization_config"] = {"quant_method": "mxfp4"}

    return edited(folder, target, pack, config)


@pytest.mark.parametrize("recipe", ["rtn", "gptq"])
@pytest.mark.parametrize(
    ("family", "first"),
    [
        ("qwen3", "w8a8-fp8-block"),
        ("qwen3", "w8a8-static"),
        ("qwen3_moe", "w8a8-fp8"),
        ("deepseek_v2", "w8a16-sym-channel"),
        ("llama4", "w8a8-fp8"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_result_is_that_of_its_floats(family, first, recipe, tiny_model, tmp_path, caplog):
    source = tiny_model(family)
    if first == "mxfp4":
        again = mxfp4(source, tmp_path / "first")
    else:
        scales = {}
        if "static" in first:
            reader = CheckpointReader(source)
            scales = {"input_scales": {n.removesuffix(".weight"): 0.05 for n in reader.entries}}
        again = quantize(source, tmp_path / "first", first, recipe="rtn", **scales)
    floats = tmp_path / "floats"
    dequantize_checkpoint(again, floats)
    with caplog.at_level(logging.WARNING):
        of_codes = quantize(again, tmp_path / "of_codes", "w4a16-sym-g32", recipe=recipe)
    assert "first is quantized" in caplog.text and "its errors stay" in caplog.text
    caplog.clear()
    of_floats = quantize(floats, tmp_path / "of_floats", "w4a16-sym-g32", recipe=recipe)
    assert "its errors stay" not in caplog.text
    found, want = tensors_of(of_codes), tensors_of(of_floats)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert LLM(str(of_codes), device="cpu", max_model_len=64).logits([3, 4, 5]).isfinite().all()


@pytest.mark.parametrize(
    ("first", "second"), [("w4a16-sym-g32", "w4a16-sym-g32"), ("w4a16-asym-g32", "w8a8")]
)
def test_integers_of_no_more_bits_are_refused(first, second, tiny_model, tmp_path):
    source = quantize(tiny_model("qwen3"), tmp_path / "first", first, recipe="rtn")
    with pytest.raises(InputError, match=rf"first: is quantized already \({first}\).*convert"):
        quantize(source, tmp_path / "second", second, recipe="rtn")
    assert not (tmp_path / "second").exists()
