"""Cosines and sines against transformers' own, for every scaling type that is supported."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from formats.architecture.rope_types import ROPE_TYPES
from formats.errors import InputError
from qserve.model.rope import RopeConfig, cos_sin_table

CASES = {
    "default": {},
    "linear": {"factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.25},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0 + i / 40 for i in range(32)],
        "long_factor": [1.0 + i / 4 for i in range(32)],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPE_TYPES)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_table_equals_transformers(kind, theta):
    parameters = {"rope_type": kind, "rope_theta": theta, **CASES[kind]}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(256)[None])
    rope = RopeConfig.from_dict(config.rope_parameters, dim=64, max_position=256)
    table = cos_sin_table(rope, 256, torch.device("cpu"))
    assert table.shape == (256, 64)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], atol=1e-5, rtol=0)


def test_yarn_mscale_keys():
    parameters = {**CASES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **parameters},
    )
    cos, _ = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(9)[None])
    rope = RopeConfig.from_dict(config.rope_parameters, dim=64, max_position=256)
    got = cos_sin_table(rope, 9, torch.device("cpu"))
    torch.testing.assert_close(got[:, :32], cos[0, :, :32], atol=1e-5, rtol=0)


@pytest.mark.parametrize("more", [{}, {"factor": 2.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("length", [64, 65])
def test_longest_sequence_decides_between_short_and_long_factors(length, more):
    """transformers decides by the sequence at hand: a whole one of that length."""
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **CASES["longrope"], **more}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    rope = RopeConfig.from_dict(config.rope_parameters, dim=64, max_position=256)
    table = cos_sin_table(rope, length, torch.device("cpu"))
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], atol=1e-5, rtol=0)


def test_long_factors_of_another_head_are_refused():
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **CASES["longrope"]}
    rope = RopeConfig.from_dict(parameters, dim=48, max_position=256)
    with pytest.raises(InputError, match="expected 24 numbers.*found 32"):
        cos_sin_table(rope, 256, torch.device("cpu"))


def test_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="axial") as error:
        RopeConfig.from_dict({"rope_type": "axial", "rope_theta": 1e4}, dim=64, max_position=64)
    assert "llama3" in str(error.value)


def test_dynamic_beyond_the_trained_length_is_refused():
    rope = RopeConfig.from_dict(
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, dim=64, max_position=128
    )
    rope.check_length(128)
    with pytest.raises(InputError, match="--max-model-len 128"):
        rope.check_length(129)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("yarn", {"rope_theta": 1e308}),
        ("yarn", {"rope_theta": 1.0}),
        ("yarn", {"beta_fast": -1.0}),
        ("yarn", {"factor": 1e-300}),
        ("yarn", {"mscale": 1.0, "mscale_all_dim": -10.0 / 1.3862943611198906}),
        ("yarn", {"attention_factor": float("inf")}),
        ("linear", {"factor": float("nan")}),
        ("linear", {"factor": 1e-44}),
        ("llama3", {"factor": float("nan")}),
        ("longrope", {"original_max_position_embeddings": 1}),
        ("longrope", {"short_factor": ["a"] * 32, "long_factor": ["a"] * 32}),
    ],
)
def test_invalid_rope_numbers_raise_one_error(kind, numbers):
    parameters = {"rope_type": kind, "rope_theta": 1e4, **CASES[kind], **numbers}
    rope = RopeConfig.from_dict(parameters, dim=64, max_position=256)
    with pytest.raises(InputError, match="rope_parameters: .* give no valid rotary embedding"):
        cos_sin_table(rope, 256, torch.device("cpu"))
