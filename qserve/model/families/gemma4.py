"""Gemma 4 (text): Gemma 3 with wider heads in layers that see all keys, in which keys before their
norm are the values, too; a norm of values without weights; a factor on what a layer returns.
26B-A4B has experts next to the feed-forward of each layer.

Columns of the family's row hold the two kinds of layers; the row has no per-layer embeddings.
"""

from dataclasses import replace

import torch

from qserve.model.blocks.dense_and_experts import DenseAndExperts
from qserve.model.blocks.layer import ScaledLayer
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.model_config import ModelConfig
from qserve.model.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> ScaledLayer:
    local = config_of_layer(config, weights.number)
    k_norm = weights.norm("self_attn.k_norm")
    return ScaledLayer(
        attention_norm=llama.build_norm(local, weights, "input_layernorm"),
        attention=llama.build_attention(
            local,
            weights,
            scale=1.0,
            q_norm=weights.norm("self_attn.q_norm"),
            k_norm=k_norm,
            v_norm=torch.ones_like(k_norm),
            keys_are_values=len(local.family.qkv.members) == 2,
        ),
        attention_end=BranchEnd(llama.build_norm(local, weights, "post_attention_layernorm")),
        mlp_norm=llama.build_norm(local, weights, "pre_feedforward_layernorm"),
        mlp=_feed_forward(local, weights),
        mlp_end=BranchEnd(llama.build_norm(local, weights, "post_feedforward_layernorm")),
        factor=weights.scalar(),
    )


def _feed_forward(config: ModelConfig, weights: LayerWeights) -> Mlp | DenseAndExperts:
    mlp = llama.build_mlp(config, weights)
    if config.family.experts is None:
        return mlp
    dense_norm, experts_norm, experts_end = (
        llama.build_norm(config, weights, f"{name}_feedforward_layernorm_{number}")
        for name, number in (("post", 1), ("pre", 2), ("post", 2))
    )
    return DenseAndExperts(
        mlp=mlp,
        mlp_norm=dense_norm,
        experts=moe.build_mlp(config, weights),
        experts_norm=experts_norm,
        experts_end=BranchEnd(experts_end),
    )


def config_of_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """Return the config with the heads of a layer."""
    row = config.family.of_layer(layer, config.values)
    if row is config.family:
        return config
    return replace(
        config,
        family=row,
        head_dim=config.values["global_head_dim"],
        num_kv_heads=config.values["num_global_key_value_heads"],
    )
