"""Hunyuan (dense): Llama with a norm over each head's queries and keys, after the rotation."""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.model_config import ModelConfig
from qserve.model.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    return llama.build_layer(
        config,
        weights,
        q_norm=weights.norm("self_attn.query_layernorm"),
        k_norm=weights.norm("self_attn.key_layernorm"),
        rotates_first=True,
    )
