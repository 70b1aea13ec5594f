"""A linear in float whose name in transformers differs is listed under both names."""

import json

import pytest
import torch
import transformers

from calibrate.pipeline import quantize_checkpoint
from formats.convert import convert_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.qserve.model.variants import TOKENS, relative


@pytest.mark.parametrize("family", ["lfm3"])  # gates of heads, which the groups do not divide
def test_transformers_loads_linears_in_float(family, tiny_model, tmp_path):
    target = tmp_path / "quantized"
    quantize_checkpoint(
        tiny_model(family),
        target,
        scheme=Scheme.parse("w4a16-sym-g32"),
        recipe="rtn",
        output_format="compressed-tensors",
        progress=False,
    )
    check(target)
    for layout in ("gptq", "compressed-tensors"):
        convert_checkpoint(target, tmp_path / layout, output_format=layout)
        target = tmp_path / layout
    check(target)


def check(target):
    block = json.loads((target / "config.json").read_text())["quantization_config"]
    for name in ("gate_proj", "g_proj"):
        assert any(rf"self_attn\.{name}" in each for each in block["ignore"]), name
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(LLM(str(target), device="cpu", max_model_len=64).logits(TOKENS), want) < 1e-4
