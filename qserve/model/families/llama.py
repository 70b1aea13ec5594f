"""Llama, Mistral, Ministral, Qwen2, Phi-3, SmolLM3 and Seed-OSS: one module for all.

Columns of formats/families.py hold what differs: biases, windows, layers without rotation, ties,
matrices that are one on disk.

The other families are made of the same parts: each says what it has in place of Llama's.
"""

from collections.abc import Callable
from typing import Any

from qserve.model.blocks.attention import Attention
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.gated_mlp import GatedMlp
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import RmsNorm
from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig
from qserve.model.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights, **attention: Any) -> Layer:
    """`attention`: what differs from build_attention's."""
    return Layer(
        attention_norm=build_norm(config, weights, "input_layernorm"),
        attention=build_attention(config, weights, **attention),
        mlp_norm=build_norm(config, weights, "post_attention_layernorm"),
        mlp=build_mlp(config, weights),
    )


def build_norm(config: ModelConfig, weights: LayerWeights, name: str) -> RmsNorm:
    return RmsNorm(weights.norm(name), config.rms_norm_eps)


def build_attention(config: ModelConfig, weights: LayerWeights, **different: Any) -> Attention:
    return Attention(
        config,
        window=config.windows[weights.number],
        rotary=weights.rotary,
        qkv_proj=weights.linear(config.family.qkv),
        o_proj=weights.linear(config.family.o),
        kernel=weights.kernels.get("attention"),
        **weights.kv_scales(),
        **different,
    )


def build_mlp(config: ModelConfig, weights: LayerWeights) -> GatedMlp:
    family = config.family
    return GatedMlp(
        gate_up_proj=weights.linear(family.gate_up),
        down_proj=weights.linear(family.down),
        activation=family.activation,
    )


def build_decoder(
    config: ModelConfig,
    weights: Weights,
    build_layer: Callable[[ModelConfig, LayerWeights], Layer],
) -> Decoder:
    family, values = config.family, config.values
    embedding = weights.embedding()
    return Decoder(
        config,
        embedding=Embedding(embedding, family.embedding_factor(values)),
        layers=[build_layer(config, layer) for layer in weights.layers()],
        head=weights.head(embedding),
        norm=RmsNorm(weights.last_norm(), config.rms_norm_eps),
        logits_divisor=values.get(family.logits_divisor_key, 1.0),
        logits_cap=values.get(family.logits_cap_key),
    )
