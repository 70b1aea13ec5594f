"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without rope, an MLP, or experts with
a shared expert.

MLPs and experts are ungated and use squared ReLU.
"""

import math

from qserve.model.blocks.lone_layer import LoneLayer, NoMixer
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.families.hybrid import granite
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> LoneLayer:
    blocks = config.family.blocks(config.values, weights.number)
    if blocks.state:
        limits = config.values["time_step_min"], math.inf
        block = granite.build_mamba(config, weights, granite.mamba_shape(config, weights, limits))
    elif blocks.attention:
        block = llama.build_attention(config, weights)
    elif blocks.experts:
        block = NoMixer(moe.build_mlp(config, weights))
    else:
        block = NoMixer(llama.build_mlp(config, weights))
    return LoneLayer(norm=llama.build_norm(config, weights, "norm"), block=block)
