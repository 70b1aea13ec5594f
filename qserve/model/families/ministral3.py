"""Ministral 3: Llama with queries scaled by the logarithm of their position."""

import torch

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    scales = query_scales(config, weights)

    def build_layer(config: ModelConfig, layer: LayerWeights) -> Layer:
        return llama.build_layer(config, layer, query_scales=scales)

    return llama.build_decoder(config, weights, build_layer)


def query_scales(config: ModelConfig, weights: Weights) -> torch.Tensor | None:
    """Return 1 + beta ln(1 + floor(position / original length)) per position; None: all 1."""
    parameters = config.ropes[0].parameters
    beta = parameters.get("llama_4_scaling_beta")
    original = parameters.get("original_max_position_embeddings")
    if not beta or weights.max_model_len <= original:
        return None
    positions = torch.arange(weights.max_model_len, device=weights.device)
    return 1 + beta * torch.log(1 + torch.floor(positions / original))
