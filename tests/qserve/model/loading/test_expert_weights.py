"""Tests of qserve/model/loading/expert_weights.py."""

import pytest

from formats.architecture.sizes import num_experts
from formats.families import FAMILIES
from qkernels.moe.routing import Glu
from qserve import LLM
from qserve.model.loading import weight_source
from qserve.model.loading.expert_weights import glu_of


def test_gpt_oss_needs_no_key_that_its_published_config_lacks():
    published = {"model_type": "gpt_oss", "hidden_act": "silu"}
    experts = FAMILIES["GptOssForCausalLM"].experts
    assert glu_of(experts, "silu", published | {"swiglu_limit": 5.0}) == Glu(
        alpha=1.702, offset=1.0, limit=5.0
    )
    assert glu_of(experts, "silu", published).limit == 7.0
    assert glu_of(experts, "silu", published | {"swiglu_alpha": 1.5}).alpha == 1.5


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_experts_of_a_layer_are_decoded_in_two_calls(written, monkeypatch, method):
    """One call for gate and up of all experts, one for down; none for a single expert."""
    alone, together = [], []
    one, many = weight_source.decode_linear, weight_source.decode_together
    monkeypatch.setattr(
        weight_source, "decode_linear", lambda name, *rest: alone.append(name) or one(name, *rest)
    )
    monkeypatch.setattr(
        weight_source,
        "decode_together",
        lambda tensors, quant: together.append(len(tensors)) or many(tensors, quant),
    )
    folder = written("w4a16-sym-g32", method, "qwen3_moe")
    llm = LLM(folder, device="cpu", max_model_len=64)
    config = llm.engine.model_config.values
    layers, experts = config["num_hidden_layers"], num_experts(config)
    assert together == [2 * experts, experts] * layers
    assert alone and not any(".experts." in name for name in alone)
