"""Bamba: Mamba-2 layers, and some attention layers with rotary embedding over half of each head."""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.families.hybrid import granite
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    has_state = config.state_layers[weights.number]
    build_mixer = granite.build_mamba if has_state else llama.build_attention
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=build_mixer(config, weights),
        mlp_norm=llama.build_norm(config, weights, "pre_ff_layernorm"),
        mlp=llama.build_mlp(config, weights),
    )
