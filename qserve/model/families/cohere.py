"""Command R (Cohere, Cohere 2) and Phi: attention and MLP in parallel, with one shared layer norm.

The family's row has the other differences from Llama: interleaved rotary embedding, windows, the
factor of logits.
"""

from qserve.model.blocks.layer import ParallelLayer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> ParallelLayer:
    return ParallelLayer(
        norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(config, weights),
        mlp=llama.build_mlp(config, weights),
    )
