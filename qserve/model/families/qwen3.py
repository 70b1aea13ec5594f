"""Qwen3: Llama with query and key norms per head, before the rotary embedding."""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    return llama.build_layer(
        config,
        weights,
        q_norm=weights.norm("self_attn.q_norm"),
        k_norm=weights.norm("self_attn.k_norm"),
    )
