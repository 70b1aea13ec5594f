"""Tests of qserve/model/loading/expert_weights.py."""

from dataclasses import replace

import pytest
import torch

from formats.architecture.sizes import num_experts
from formats.checkpoint import CheckpointReader
from formats.families import FAMILIES
from formats.files.memory_tensors import MemoryTensors
from formats.in_memory.weights import round_to_nearest, same_weight
from formats.layouts import LAYOUTS, decode_linear, encode_linear
from formats.quant_config import QuantConfig
from formats.scheme import Scheme
from qkernels.moe.routing import Glu
from qserve import LLM
from qserve.model.loading import weight_source
from qserve.model.loading.expert_weights import glu_of
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig


def test_gpt_oss_needs_no_key_that_its_published_config_lacks():
    published = {"model_type": "gpt_oss", "hidden_act": "silu"}
    experts = FAMILIES["GptOssForCausalLM"].experts
    assert glu_of(experts, "silu", published | {"swiglu_limit": 5.0}) == Glu(
        alpha=1.702, offset=1.0, limit=5.0
    )
    assert glu_of(experts, "silu", published).limit == 7.0
    assert glu_of(experts, "silu", published | {"swiglu_alpha": 1.5}).alpha == 1.5


def decoded_alone(monkeypatch):
    """Names of linears that are decoded alone from now on."""
    names, decode = [], weight_source.decode_linear
    monkeypatch.setattr(
        weight_source,
        "decode_linear",
        lambda name, *rest: names.append(name) or decode(name, *rest),
    )
    return names


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_experts_of_a_layer_are_decoded_in_two_calls(written, monkeypatch, method):
    """One call for gate and up of all experts, one for down; none for a single expert."""
    alone, together, many = decoded_alone(monkeypatch), [], weight_source.decode_together
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


@pytest.fixture
def source_of(tiny_model):
    """(format, scheme of each expert) -> (source of these experts, shape of one, their weights)."""

    def make(method, schemes):
        folder = tiny_model("qwen3_moe")
        shape, generator = (64, 64), torch.Generator().manual_seed(5)
        names = [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(len(schemes))]
        kinds = dict(zip(names, map(Scheme.parse, schemes), strict=True))
        quant = QuantConfig.of_modules(method, kinds)
        tensors, wanted = {}, {}
        for name, scheme in kinds.items():
            weight = round_to_nearest(torch.randn(shape, generator=generator), scheme.weight, name)
            encoded = encode_linear(weight, scheme, LAYOUTS[method], name)
            tensors |= {f"{name}.{field}": tensor for field, tensor in encoded.items()}
            wanted[name] = decode_linear(name, encoded, quant)
        config = replace(ModelConfig.from_folder(folder), quant=quant)
        reader = MemoryTensors(tensors.items(), CheckpointReader(folder).config)
        return WeightSource(reader, config), shape, wanted

    return make


def test_experts_of_several_schemes_are_decoded_together_by_scheme(source_of, monkeypatch):
    source, shape, wanted = source_of(
        "compressed-tensors", ["w4a16-sym-g32", "w8a16-sym-g32"] * 3 + ["w8a8-fp8"]
    )
    alone = decoded_alone(monkeypatch)
    source.decode_together(dict.fromkeys(wanted, shape))
    for name, weight in wanted.items():
        assert same_weight(source.weight(name, shape), weight) is None
    assert alone == list(wanted)[-1:], "the one expert of its scheme"


def test_different_experts_are_read_once_and_decoded_separately(source_of, monkeypatch):
    """Each NVFP4 linear has a scale of its own. Only those of the first attempt are read early."""
    source, shape, wanted = source_of("compressed-tensors", ["w4a16-nvfp4"] * 5)
    monkeypatch.setattr(weight_source, "CODES_AT_ONCE", 2 * 64 * 64)
    reads, read = [], source._read.get
    monkeypatch.setattr(
        source._read, "get", lambda name, **rest: reads.append(name) or read(name, **rest)
    )
    alone = decoded_alone(monkeypatch)
    source.decode_together(dict.fromkeys(wanted, shape))
    assert {name.rpartition(".")[0] for name in reads} == set(list(wanted)[:2])
    for name, weight in wanted.items():
        assert same_weight(source.weight(name, shape), weight) is None
    assert alone == list(wanted) and len(reads) == len(set(reads))
