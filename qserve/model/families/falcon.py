"""Falcon: attention and MLP in parallel, with one shared layer norm or one for each.

The family's row has the other differences from Llama: queries, keys and values grouped by KV head
on disk, biases. In Falcon-RW the MLP follows attention, and attention uses ALiBi.
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
    if not config.values["parallel_attn"]:
        return llama.build_layer(config, weights)
    norm, *others = (
        llama.build_norm(config, weights, norm.name)
        for norm in config.family.norms
        if weights.has_norm(norm.name)
    )
    return ParallelLayer(
        norm=norm,
        attention=llama.build_attention(config, weights),
        mlp=llama.build_mlp(config, weights),
        mlp_norm=others[0] if others else None,
    )
