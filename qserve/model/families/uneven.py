"""Laguna and MiMo-V2-Flash: experts, and attention whose heads differ between layers with a window
and layers without.

Laguna has a gate per head or per channel after attention. In MiMo keys are wider than values, and
layers with a window have sinks. The family's row has the other differences.
"""

from typing import Any

import torch
from torch.nn.functional import softplus

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.uneven_attention import UnevenAttention
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    local = weights.config
    head_norms = {
        f"{name}_norm": weights.norm(f"self_attn.{name}_norm")
        for name in "qk"
        if weights.has_norm(f"self_attn.{name}_norm")
    }
    return Layer(
        attention_norm=llama.build_norm(local, weights, "input_layernorm"),
        attention=build_attention(local, weights, **head_norms, **weights.sinks()),
        mlp_norm=llama.build_norm(local, weights, "post_attention_layernorm"),
        mlp=moe.build_mlp(local, weights),
    )


def build_attention(config: ModelConfig, weights: LayerWeights, **parts: Any) -> UnevenAttention:
    """Build attention. `config`: this layer's config. `parts`: additional arguments."""
    family, values = config.family, config.values
    return UnevenAttention(
        config,
        window=config.windows[weights.number],
        rotary=weights.rotary,
        qkv_proj=weights.linear(family.qkv),
        o_proj=weights.linear(family.o),
        kernel=weights.kernels.get("attention"),
        is_gated=family.gated_attention,
        gates=None if family.head_gates is None else weights.linear(family.head_gates),
        activation={"softplus": softplus, "sigmoid": torch.sigmoid}[family.gate_activation],
        value_dim=values.get("v_head_dim") or config.head_dim,
        value_factor=values.get(family.value_factor_key) or 1.0,
        **weights.kv_scales(),
        **parts,
    )
