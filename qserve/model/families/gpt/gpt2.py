"""GPT-2, GPT-BigCode, GPT-J, BLOOM and MPT: layer norms, an ungated MLP.

GPT-J has one norm, which attention and MLP read in parallel; the others have two norms in sequence.
The family's row has the other differences from Llama: learned positions, interleaved rotary
embedding, ALiBi, a norm of embeddings, merged matrices.
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
    norm, *others = (llama.build_norm(config, weights, n.name) for n in config.family.norms)
    attention = llama.build_attention(config, weights)
    mlp = llama.build_mlp(config, weights)
    if not others:
        return ParallelLayer(norm=norm, attention=attention, mlp=mlp)
    (mlp_norm,) = others
    return Layer(attention_norm=norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)
