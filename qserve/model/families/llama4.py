"""Llama 4 (text).

Layers with rotary embedding attend only within their chunk of positions, and norm queries and keys
after RoPE. The other layers attend to all keys, with queries scaled by the logarithm of
their position. Each token has one routed expert, whose input is multiplied by the routing weight.

The family's row has the layers with rotary embedding and those with experts.
"""

import torch

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig

CHUNKED = "chunked_attention"


def build(config: ModelConfig, weights: Weights) -> Decoder:
    scales = query_scales(config, weights)

    def build_layer(config: ModelConfig, layer: LayerWeights) -> Layer:
        rotates = config.ropes[layer.number] is not None
        norms = {}
        if rotates and config.values["use_qk_norm"]:  # a norm without weights
            shape = {"dtype": weights.dtype, "device": weights.device}
            norms = {name: torch.ones(config.head_dim, **shape) for name in ("q_norm", "k_norm")}
        is_chunked = config.values["layer_types"][layer.number] == CHUNKED
        return Layer(
            attention_norm=llama.build_norm(config, layer, "input_layernorm"),
            attention=llama.build_attention(
                config,
                layer,
                **norms,
                rotates_first=bool(norms),
                query_scales=None if rotates else scales,
                chunk_size=chunk_size(config, weights) if is_chunked else None,
            ),
            mlp_norm=llama.build_norm(config, layer, "post_attention_layernorm"),
            mlp=moe.build_mlp(config, layer),
        )

    return llama.build_decoder(config, weights, build_layer)


def chunk_size(config: ModelConfig, weights: Weights) -> int | None:
    """Return the number of positions in an attention chunk; None: no request exceeds one chunk."""
    size = config.values["attention_chunk_size"]
    return None if size is None or weights.max_model_len <= size else size


def query_scales(config: ModelConfig, weights: Weights) -> torch.Tensor | None:
    """Return 1 + scale ln(1 + floor((position + 1) / floor_scale)) per position; None: all 1."""
    values = config.values
    if not values["attn_temperature_tuning"] or weights.max_model_len < values["floor_scale"]:
        return None
    positions = torch.arange(1, weights.max_model_len + 1, device=weights.device)
    steps = torch.floor(positions / values["floor_scale"])
    return 1 + values["attn_scale"] * torch.log1p(steps)
