"""A folder that `save_pretrained` writes after `replace_linears` is a checkpoint."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formats.inspection.inspect import inspect_checkpoint
from qkernels import QuantLinear, replace_linears
from qserve import LLM

IDS = [5, 6, 7, 300, 12, 99, 3]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("scheme", "ignore"),
    [
        ("w4a16-sym-g32", ["lm_head"]),
        ("w4a16-sym-g32", ["lm_head", "layers.0.mlp"]),
        ("w8a16-sym-g32", []),
        ("w8a8", ["lm_head"]),
        ("w4a16-mxfp4", ["lm_head"]),
    ],
)
def test_saved_folder_has_the_logits_of_the_model(tiny_model, tmp_path, scheme, ignore):
    model = load(tiny_model("qwen2"))
    replaced = replace_linears(model, scheme, ignore=ignore)
    assert ("lm_head" in replaced) == (not ignore)
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    model.save_pretrained(tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.ok, inspection.problems
    llm = LLM(tmp_path, device="cpu", dtype="float32", num_gpu_blocks_override=8, admission="fits")
    try:
        found = llm.logits(IDS)
    finally:
        llm.close()
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16-sym-g32"])
def test_what_files_cannot_state_is_not_stated(tiny_model, scheme):
    """W4A8 has no field in GPTQ; transformers stores the experts of Qwen3-MoE as one tensor."""
    model = load(tiny_model("llama" if scheme == "w4a8" else "qwen3_moe"))
    scheme = "w4a8-g32" if scheme == "w4a8" else scheme
    replace_linears(model, scheme, ignore=["lm_head"])
    assert any(isinstance(each, QuantLinear) for each in model.modules())
    assert getattr(model.config, "quantization_config", None) is None


def test_trainable_layers_stay_a_float_model(tiny_model, tmp_path):
    model = load(tiny_model("llama"))
    replace_linears(model, "w4a16-sym-g32", trainable=True)
    model.save_pretrained(tmp_path)
    assert getattr(AutoConfig.from_pretrained(tmp_path), "quantization_config", None) is None
