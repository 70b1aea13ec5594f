"""Gemma 4 (text, dense): Gemma 3 with wider heads in layers that see all keys, in which keys before
their norm are the values, too; a norm of values without weights; a factor on what a layer returns.

Columns of the family's row hold the two kinds of layers; the row has no per-layer embeddings.
"""

from dataclasses import replace

import torch

from qserve.model.blocks.layer import ScaledLayer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama
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
        mlp=llama.build_mlp(local, weights),
        mlp_end=BranchEnd(llama.build_norm(local, weights, "post_feedforward_layernorm")),
        factor=weights.scalar(),
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
