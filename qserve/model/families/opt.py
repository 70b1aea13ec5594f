"""OPT: layer norms with biases, learned positions instead of rotary embedding, an MLP with ReLU.

The family's row has all differences from Llama except the norms' names.
"""

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
        attention_norm=llama.build_norm(config, weights, "self_attn_layer_norm"),
        attention=llama.build_attention(config, weights),
        mlp_norm=llama.build_norm(config, weights, "final_layer_norm"),
        mlp=llama.build_mlp(config, weights),
    )
