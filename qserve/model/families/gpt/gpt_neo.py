"""GPT-Neo: GPT-2 with windows in some layers, and unscaled attention scores."""

from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    return Layer(
        attention_norm=llama.build_norm(config, weights, "ln_1"),
        attention=llama.build_attention(config, weights, scale=1.0),
        mlp_norm=llama.build_norm(config, weights, "ln_2"),
        mlp=llama.build_mlp(config, weights),
    )
