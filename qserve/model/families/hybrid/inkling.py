"""Inkling (text): attention with biases that depend on query and distance, and convolutions.

The family's row has the names, and the numbers of heads of layers with a window.
"""

import torch

from formats.architecture.sizes import stated_size
from formats.architecture.states.inkling import DENSE_FACTOR, PROFILES
from formats.errors import config_error
from qserve.model.blocks.states.convolved import ConvolvedLayer, RelativeAttention
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    decoder = llama.build_decoder(config, weights, build_layer)
    decoder.no_graphs = "plain torch computes attention with biases"
    if config.values.get("unpadded_vocab_size") is not None:
        decoder.num_tokens = stated_size(config.values, "unpadded_vocab_size")
    return decoder


def build_layer(config: ModelConfig, weights: LayerWeights) -> ConvolvedLayer:
    local = weights.config
    is_dense = not local.family.experts.is_in(weights.number, local.values)
    return ConvolvedLayer(
        attention_norm=llama.build_norm(local, weights, "input_layernorm"),
        attention=build_attention(local, weights),
        mlp_norm=llama.build_norm(local, weights, "post_attention_layernorm"),
        mlp=moe.build_mlp(local, weights),
        mlp_factor=weights.dense_tensor(DENSE_FACTOR) if is_dense else None,
    )


def build_attention(config: ModelConfig, weights: LayerWeights) -> RelativeAttention:
    """Build attention. `config`: this layer's config."""
    family = config.family
    window = config.windows[weights.number]
    return RelativeAttention(
        config,
        window=window,
        rotary=weights.rotary,
        qkv_proj=weights.linear(family.qkv),
        o_proj=weights.linear(family.o),
        scale=1 / config.head_dim,
        q_norm=weights.norm("self_attn.q_norm"),
        k_norm=weights.norm("self_attn.k_norm"),
        kernel=weights.kernels.get("attention"),
        factors=weights.linear(family.head_gates),
        profiles_FX=weights.kind_tensor(PROFILES, torch.float32),
        hidden_size=config.hidden_size,
        dtype=weights.constant(torch.ones(1)).dtype,
        growth=None if window is not None else _growth(config),
        **weights.state_tensors(),
        **weights.kv_scales(),
    )


def _growth(config: ModelConfig) -> tuple[int, float] | None:
    """Return floor and alpha of the growth of scores. Raises CheckpointError for other values."""
    if config.values.get("log_scaling_n_floor") is None:
        return None
    alpha = config.values.get("log_scaling_alpha", 0.1)
    if type(alpha) not in (int, float):
        raise config_error("log_scaling_alpha", "a number", alpha)
    return stated_size(config.values, "log_scaling_n_floor"), alpha
