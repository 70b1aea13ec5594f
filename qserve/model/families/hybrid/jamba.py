"""Jamba: Mamba-1 layers with norms of dt, B and C, some attention layers without rotary embedding,
and experts in some layers of either kind.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.families.hybrid import mamba
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    if config.state_layers[weights.number]:
        mixer = mamba.build_mamba(config, weights, config.norm_eps)
    else:
        mixer = llama.build_attention(config, weights)
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=mixer,
        mlp_norm=llama.build_norm(config, weights, "pre_ff_layernorm"),
        mlp=moe.build_mlp(config, weights),
    )
