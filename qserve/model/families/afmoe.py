"""AFMoE (Trinity) and PLaMo 3: norms before and after attention and MLP, and of heads.

The family's row has the other differences from Llama: names, experts and the routing rule, layers
with windows, their rotary embeddings, and the linear that computes gates of attention.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    *names, q_norm, k_norm = (norm.name for norm in config.family.norms)
    before, after, before_mlp, after_mlp = (
        llama.build_norm(config, weights, name) for name in names
    )
    build_mlp = moe.build_mlp if config.family.experts else llama.build_mlp
    return Layer(
        attention_norm=before,
        attention=llama.build_attention(
            config, weights, q_norm=weights.norm(q_norm), k_norm=weights.norm(k_norm)
        ),
        attention_end=BranchEnd(after),
        mlp_norm=before_mlp,
        mlp=build_mlp(config, weights),
        mlp_end=BranchEnd(after_mlp),
    )
