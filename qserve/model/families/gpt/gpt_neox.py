"""GPT-NeoX and Pythia: attention and MLP in parallel, each with its own layer norm.

Some configs have them in sequence instead. The family's row has the other differences from Llama:
queries, keys and values grouped by head on disk, names, biases, an ungated MLP.
"""

from qserve.model.blocks.layer import Layer, ParallelLayer
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer | ParallelLayer:
    norm = llama.build_norm(config, weights, "input_layernorm")
    mlp_norm = llama.build_norm(config, weights, "post_attention_layernorm")
    attention = llama.build_attention(config, weights)
    mlp = llama.build_mlp(config, weights)
    if config.values.get("use_parallel_residual", True):
        return ParallelLayer(norm=norm, attention=attention, mlp=mlp, mlp_norm=mlp_norm)
    return Layer(attention_norm=norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)
