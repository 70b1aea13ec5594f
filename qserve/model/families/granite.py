"""Granite 3 and 4 (dense and MoE), HyperCLOVA X: Llama with factors on embeddings, branches,
attention scores and logits.

HyperCLOVA X may have norms after attention and MLP. The factors of embeddings and logits are in the
family's row.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd, Norm
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    factor = config.values["residual_multiplier"]
    attention_end, mlp_end = (
        BranchEnd(_norm_after(config, weights, name), factor)
        for name in ("post_norm1", "post_norm2")
    )
    scale = config.values["attention_multiplier"]
    build_mlp = moe.build_mlp if config.family.experts else llama.build_mlp
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(config, weights, scale=scale, **weights.sinks()),
        attention_end=attention_end,
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=build_mlp(config, weights),
        mlp_end=mlp_end,
    )


def _norm_after(config: ModelConfig, weights: LayerWeights, name: str) -> Norm | None:
    return llama.build_norm(config, weights, name) if weights.has_norm(name) else None
