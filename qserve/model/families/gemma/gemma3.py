"""Gemma 3 (text): Gemma 2 with query and key norms per head, without soft caps.

Layers with a sliding window have another rotary embedding than the others; config.json has both.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.families.gemma import gemma2
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    gemma2.check_causal(config)
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    return gemma2.build_layer(
        config,
        weights,
        q_norm=weights.norm("self_attn.q_norm"),
        k_norm=weights.norm("self_attn.k_norm"),
    )
