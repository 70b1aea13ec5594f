"""Llama, Mistral and Qwen2: one module, since they differ in biases and windows alone.

Those are columns of formats/families.py.
"""

from collections.abc import Callable

import torch

from qserve.model.blocks.attention import Attention
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.gated_mlp import GatedMlp
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import RmsNorm
from qserve.model.blocks.rotary import Rotary
from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig
from qserve.model.weights import LayerWeights, Weights


def build_layer(
    config: ModelConfig, weights: LayerWeights, rotary: Rotary, **head_norms: torch.Tensor
) -> Layer:
    """`head_norms`: q_norm and k_norm of families that have them."""
    family, eps = config.family, config.rms_norm_eps
    return Layer(
        attention_norm=RmsNorm(weights.norm("input_layernorm"), eps),
        attention=Attention(
            config,
            window=config.windows[weights.number],
            rotary=rotary,
            qkv_proj=weights.linear(family.qkv),
            o_proj=weights.linear(family.o),
            kernel=weights.kernels.get("attention"),
            **head_norms,
            **weights.kv_scales(),
        ),
        mlp_norm=RmsNorm(weights.norm("post_attention_layernorm"), eps),
        mlp=GatedMlp(
            gate_up_proj=weights.linear(family.gate_up), down_proj=weights.linear(family.down)
        ),
    )


def build(
    config: ModelConfig,
    weights: Weights,
    build_layer: Callable[[ModelConfig, LayerWeights, Rotary], Layer] = build_layer,
) -> Decoder:
    embedding = weights.embedding()
    rotary = Rotary(weights.cos_sin(config.rope))
    return Decoder(
        config,
        embedding=Embedding(embedding),
        layers=[build_layer(config, layer, rotary) for layer in weights.layers()],
        head=weights.head(embedding),
        norm=RmsNorm(weights.last_norm(), config.rms_norm_eps),
    )
