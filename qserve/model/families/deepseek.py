"""DeepSeek-V2 and V3, Moonlight, Kimi-K2, GLM-4.7-Flash, Mistral 4, MiniCPM3: latent attention.

Columns of the family's row hold what differs: the router's rule, the first layers, which have no
experts, as all of MiniCPM3's, whose branches have a factor. config.json decides whether queries
come from latents of their own, and whether they grow with their position.
"""

import torch

from formats.architecture.rows.latent_parts import KV_NORM, Q_NORM, QUERIES
from qserve.model.blocks.latent.attention import LatentAttention, LatentShape
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama, ministral3, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig
from qserve.model.rope import RopeConfig, yarn_magnitude


def build(config: ModelConfig, weights: Weights) -> Decoder:
    scales = ministral3.query_scales(config, weights)

    def build_with_scales(config: ModelConfig, layer: LayerWeights) -> Layer:
        return build_layer(config, layer, scales)

    return llama.build_decoder(config, weights, build_with_scales)


def build_layer(
    config: ModelConfig, weights: LayerWeights, query_scales: torch.Tensor | None = None
) -> Layer:
    depth, has_experts = config.values.get("scale_depth"), config.family.experts is not None
    end = BranchEnd(factor=1.0 if depth is None else depth * config.num_layers**-0.5)
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=build_attention(config, weights, query_scales),
        attention_end=end,
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
        mlp_end=end,
    )


def build_attention(
    config: ModelConfig, weights: LayerWeights, query_scales: torch.Tensor | None
) -> LatentAttention:
    family, values = config.family, config.values
    shape = LatentShape(
        heads=config.num_heads,
        nope=values["qk_nope_head_dim"],
        rope=values["qk_rope_head_dim"],
        value=values["v_head_dim"],
        latent=values["kv_lora_rank"],
    )
    has_query_latents = QUERIES in family.latent
    key_up, value_up = weights.absorbed(shape)
    return LatentAttention(
        shape,
        rotary=weights.rotary,
        qkv_proj=weights.linear(family.qkv),
        q_b_proj=weights.linear(QUERIES) if has_query_latents else None,
        o_proj=weights.linear(family.o),
        q_norm=weights.norm(Q_NORM) if has_query_latents else None,
        kv_norm=weights.norm(KV_NORM),
        key_up=key_up,
        value_up=value_up,
        scale=(shape.nope + shape.rope) ** -0.5 * score_factor(config.ropes[weights.number]),
        query_scales=query_scales,
        kernel=weights.kernels.get("attention"),
    )


def score_factor(rope: RopeConfig) -> float:
    """Factor of scores: YaRN's second one, besides that of cosines and sines."""
    if rope.type != "yarn":
        return 1.0
    every = rope.parameters.get("mscale_all_dim") or 0
    return yarn_magnitude(rope.parameters["factor"], every) ** 2
