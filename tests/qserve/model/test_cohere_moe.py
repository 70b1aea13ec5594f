"""Cohere 2 MoE: keys of published files, and readings of them that are wrong."""

import pytest
import torch

from formats.errors import CheckpointError
from qserve.llm import LLM
from qserve.model.blocks.norm import BranchEnd
from qserve.model.model_config import ModelConfig
from tests.qserve.model.variants import TOKENS, edited, logits, relative


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("cohere2_moe")


def test_layers_follow_from_patterns(source, transformers_model, tmp_path):
    """Published files may state the number of dense layers instead of a list."""

    def change(config):
        for key in ("layer_types", "mlp_layer_types"):
            del config[key]
        config.update(first_k_dense_replace=1, sliding_window_pattern=2)

    folder = edited(source, tmp_path / "model", config=change)
    values = ModelConfig.from_folder(folder).values
    assert values["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    assert values["no_rope_layers"] == [1, 1, 0]
    assert torch.equal(logits(folder), logits(source))
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


def test_one_norm_of_attention_and_experts_is_not_scaled(source):
    """The router reads it in float; the norm of a dense layer feeds only linears."""
    from calibrate.layer_map import find_layer_map

    config = ModelConfig.from_folder(source).values
    names = find_layer_map(config)
    dense, sparse = ([pair.kind for pair in names.scale_pairs(config, i)] for i in (0, 1))
    assert dense == ["norm", "values"] and sparse == ["values"]


def sum_of_experts(layers):
    for layer in layers:
        layer.mlp_end = BranchEnd()


def unrotated_dense_layer(layers):
    assert layers[0].attention.rotary is layers[1].attention.rotary
    layers[0].attention.rotary = layers[2].attention.rotary


@pytest.mark.parametrize("change", [sum_of_experts, unrotated_dense_layer])
def test_a_wrong_reading_is_seen(source, change):
    llm = LLM(source, device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    change(llm.engine.runner.decoder.layers)
    assert relative(llm.logits(TOKENS), right) > 1e-3


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("expert_selection_fn", "tanh", "softmax or sigmoid"),
        ("shared_expert_combination_strategy", "max", "average or sum"),
        ("sliding_window_pattern", 0, "a number above 0"),
    ],
)
def test_unknown_values_are_refused(source, tmp_path, key, value, expected):
    def change(config):
        del config["layer_types"]
        config[key] = value

    folder = edited(source, tmp_path / "model", config=change)
    with pytest.raises(CheckpointError, match=f"{key}: expected {expected}"):
        LLM(folder, device="cpu", max_model_len=64)
