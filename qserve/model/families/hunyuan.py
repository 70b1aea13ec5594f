"""Hunyuan (dense and MoE): Llama with query and key norms per head, after the rotary embedding."""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    build_mlp = moe.build_mlp if config.family.experts else llama.build_mlp
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(
            config,
            weights,
            q_norm=weights.norm("self_attn.query_layernorm"),
            k_norm=weights.norm("self_attn.key_layernorm"),
            rotates_first=True,
        ),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=build_mlp(config, weights),
    )
