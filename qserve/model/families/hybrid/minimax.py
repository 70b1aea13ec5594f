"""MiniMax-Text-01 and MiniMax-M1: lightning attention, softmax attention in some layers, experts.

The residual stream is normed: the output of a block is added to its normed input, each multiplied
by a factor from config.json.
"""

import torch

from qserve.model.blocks.layer import NormedStreamLayer
from qserve.model.blocks.states.lightning import LightningAttention
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> NormedStreamLayer:
    is_linear, values = config.state_layers[weights.number], config.values
    kind = "linear_attn" if is_linear else "full_attn"
    mixer = (build_lightning if is_linear else llama.build_attention)(config, weights)
    return NormedStreamLayer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=mixer,
        attention_factors=(values[f"{kind}_alpha_factor"], values[f"{kind}_beta_factor"]),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=moe.build_mlp(config, weights),
        mlp_factors=(values["mlp_alpha_factor"], values["mlp_beta_factor"]),
    )


def build_lightning(config: ModelConfig, weights: LayerWeights) -> LightningAttention:
    family, shard, D = config.family.state_mixer, weights.state_shard, config.head_dim
    (name, _), *_ = family.inputs.members
    first, last = shard.own.heads
    # On disk rows are grouped by head: queries, keys, values. The block needs all values, then all
    # keys, then all queries.
    orders = {
        name: [
            (start, start + D)
            for part in (2, 1, 0)
            for start in range((3 * first + part) * D, 3 * D * last, 3 * D)
        ]
    }
    of_all = slopes(config.values["num_attention_heads"], weights.number, config.num_layers)
    return LightningAttention(
        heads=shard.num_heads,
        head_dim=D,
        in_proj=weights.state_linear(family.inputs, orders=orders),
        out_proj=weights.state_linear(family.out),
        slopes=weights.float32_constant(of_all[first:last]),
        norm_over_ranks=weights.state_norm_over_ranks(),
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
    )


def slopes(heads: int, layer: int, num_layers: int) -> torch.Tensor:
    """Return -log of each head's decay, float32 [H]: ALiBi slopes, smaller in later layers."""
    rates_H = (2 ** (-8 / heads)) ** (torch.arange(heads, dtype=torch.float32) + 1)
    return rates_H * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)
