"""Ling 2.5 and 2.6, and Ring-linear: lightning attention, other attention in some layers, experts.

The attention of the other layers is latent attention, or Ling 2's.
"""

import torch

from formats.numerics.alibi import alibi_slopes, ling_decay_factor
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.rotary import Rotary
from qserve.model.blocks.states.lightning import LightningAttention
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.families.latent import deepseek
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig
from qserve.model.rope import RopeConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    rotary = weights.rotary(lightning_rope(config))

    def build_one(config: ModelConfig, layer: LayerWeights) -> Layer:
        return build_layer(config, layer, rotary)

    return llama.build_decoder(config, weights, build_one)


def lightning_rope(config: ModelConfig) -> RopeConfig | None:
    """Return the RoPE of lightning attention: a part of each head, in pairs of halves."""
    values = config.values
    if not values.get("linear_rope", True):
        return None
    factor = values["lightning_rotary_factor"]
    return RopeConfig.from_dict(
        {**values["rope_parameters"], "partial_rotary_factor": factor},
        dim=values["linear_head_dim"],
        max_position=values["max_position_embeddings"],
    )


def build_layer(config: ModelConfig, weights: LayerWeights, rotary: Rotary) -> Layer:
    if not config.state_layers[weights.number]:
        return (deepseek if config.family.latent else moe).build_layer(config, weights)
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=build_lightning(config, weights, rotary),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=moe.build_mlp(config, weights),
    )


def build_lightning(
    config: ModelConfig, weights: LayerWeights, rotary: Rotary
) -> LightningAttention:
    family, shard, values = config.family.state_mixer, weights.state_shard, config.values
    H, D = values["linear_num_heads"], values["linear_head_dim"]
    (name, _), *_ = family.inputs.members
    first, last = shard.own.heads
    # On disk rows are queries, then keys, then values. The block needs the opposite order.
    orders = {name: [((part * H + first) * D, (part * H + last) * D) for part in (2, 1, 0)]}
    of_all = slopes(H, weights.number, config.num_layers)
    has_groups = config.sizes["norm_groups"] != H or values.get("group_norm_size") == H
    silu = values.get("use_linear_silu", values.get("linear_silu", False))
    return LightningAttention(
        heads=shard.num_heads,
        head_dim=D,
        in_proj=weights.state_linear(family.inputs, orders=orders),
        out_proj=weights.state_linear(family.out),
        slopes=weights.float32_constant(of_all[first:last]),
        is_activated=bool(silu),
        rotary=rotary,
        query_scale=D**-0.5,
        norm_groups=shard.num_groups if has_groups else 1,
        norm_over_ranks=None if has_groups else weights.state_norm_over_ranks(),
        eps=config.norm_eps,
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
    )


def slopes(heads: int, layer: int, num_layers: int) -> torch.Tensor:
    """Return -log of each head's decay, float32 [H]: ALiBi slopes, smaller in later layers."""
    slopes_H = torch.tensor(alibi_slopes(heads), dtype=torch.float32)
    return slopes_H * ling_decay_factor(layer, num_layers)
