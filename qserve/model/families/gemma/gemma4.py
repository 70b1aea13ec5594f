"""Gemma 4 (text).

Differences from Gemma 3: layers with full attention have wider heads, and their values are the keys
before the key norm; values have a norm without weights; a factor multiplies the output of a layer.
26B-A4B has experts in parallel with the MLP of each layer. In E2B and E4B each layer has an
additional input, and the last layers read keys and values of earlier layers.

The family's row has the types of layers.
"""

import torch

from formats.errors import InputError
from qserve.model.blocks.attention import Attention
from qserve.model.blocks.dense_and_experts import DenseAndExperts
from qserve.model.blocks.layer import ScaledLayer
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import BranchEnd
from qserve.model.blocks.shared_attention import SharedAttention
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    tokens, inputs = config.vocab_size, config.values["vocab_size_per_layer_input"]
    if config.family.layer_inputs is not None and inputs < tokens:
        raise InputError(
            "config.json vocab_size_per_layer_input",
            f"expected the {tokens} tokens of vocab_size or more, found {inputs}",
            "copy it from the float model",
        )
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> ScaledLayer:
    local = weights.config
    return ScaledLayer(
        attention_norm=llama.build_norm(local, weights, "input_layernorm"),
        attention=build_attention(local, weights),
        attention_end=BranchEnd(llama.build_norm(local, weights, "post_attention_layernorm")),
        mlp_norm=llama.build_norm(local, weights, "pre_feedforward_layernorm"),
        mlp=_feed_forward(local, weights),
        mlp_end=BranchEnd(llama.build_norm(local, weights, "post_feedforward_layernorm")),
        factor=weights.scalar(),
        layer_input=weights.layer_input(),
    )


def build_attention(config: ModelConfig, weights: LayerWeights) -> Attention:
    source = config.family.kv_source(weights.number, config.values)
    q_norm = weights.norm("self_attn.q_norm")
    if source is not None:
        return SharedAttention(
            config,
            window=config.windows[weights.number],
            rotary=weights.rotary,
            qkv_proj=weights.linear(config.family.qkv),
            o_proj=weights.linear(config.family.o),
            kernel=weights.kernels.get("attention"),
            scale=1.0,
            q_norm=q_norm,
            source=source,
        )
    k_norm = weights.norm("self_attn.k_norm")
    return llama.build_attention(
        config,
        weights,
        scale=1.0,
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm=torch.ones_like(k_norm),
        keys_are_values=len(config.family.qkv.members) == 2,
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
