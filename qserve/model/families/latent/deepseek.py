"""Latent attention: DeepSeek, GLM-5, Moonlight, Kimi-K2, GLM-4.7-Flash, Mistral 4, MiniCPM3, AXK1.

The family's row has the differences: the routing rule, and the first layers, which have no experts.
MiniCPM3 has no experts in any layer, and a factor on its branches. config.json decides whether
queries come from query latents and whether they are scaled by position. Layers of DeepSeek-V3.2 and
GLM-5 have indexers; they are loaded only if contexts may be longer than the number of keys that an
indexer selects.
"""

import torch

from formats.architecture.rows.latent_parts import AFTER_EXPERTS, norm_of, queries_of
from formats.errors import InputError
from qserve.model.blocks.latent.attention import LatentAttention, LatentShape
from qserve.model.blocks.latent.indexer import Selection
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama, ministral3, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig
from qserve.model.rope import RopeConfig, yarn_magnitude


def build(config: ModelConfig, weights: Weights) -> Decoder:
    scales, selection = ministral3.query_scales(config, weights), Selection()
    if weights.pipeline is not None:
        check_stage(config, weights)

    def build_one(config: ModelConfig, layer: LayerWeights) -> Layer:
        return build_layer(config, layer, scales, selection)

    return llama.build_decoder(config, weights, build_one)


def check_stage(config: ModelConfig, weights: Weights) -> None:
    """Raise InputError if a stage's first layer uses keys that an earlier stage's layer selects."""
    first = weights.pipeline.layers(config.num_layers).start
    row = config.family.indexer
    if weights.layer(first).selects_keys and not row.is_in(first, config.values):
        raise InputError(
            "--pipeline-parallel-size",
            f"layer {first}, the first of a stage, has no indexer: it attends to the keys that an"
            " earlier layer selects",
            f"use another number, or --max-model-len {config.values[row.count_key]}",
        )


def build_layer(
    config: ModelConfig,
    weights: LayerWeights,
    query_scales: torch.Tensor | None = None,
    selection: Selection | None = None,
) -> Layer:
    """Build a layer. `selection`: keys selected by an earlier layer; None: a single layer."""
    depth, has_experts = config.values.get("scale_depth"), config.family.experts is not None
    end = BranchEnd(factor=1.0 if depth is None else depth * config.num_layers**-0.5)
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=build_attention(config, weights, query_scales, selection or Selection()),
        attention_end=end,
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
        mlp_end=_norm_after_experts(config, weights) or end,
    )


def _norm_after_experts(config: ModelConfig, weights: LayerWeights) -> BranchEnd | None:
    """Return the end of A.X K1's branch with experts; None: no norm follows the feed-forward."""
    experts = config.family.experts
    has_norm = weights.has_norm(AFTER_EXPERTS) and experts.is_in(weights.number, config.values)
    return BranchEnd(llama.build_norm(config, weights, AFTER_EXPERTS)) if has_norm else None


def build_attention(
    config: ModelConfig,
    weights: LayerWeights,
    query_scales: torch.Tensor | None,
    selection: Selection,
) -> LatentAttention:
    family, values = config.family, config.values
    shape = LatentShape(
        heads=config.num_heads,
        nope=values["qk_nope_head_dim"],
        rope=values["qk_rope_head_dim"],
        value=values["v_head_dim"],
        latent=values["kv_lora_rank"],
    )
    queries = queries_of(family)
    key_up, value_up = weights.absorbed(shape)
    return LatentAttention(
        shape,
        rotary=weights.rotary,
        qkv_proj=weights.linear(family.qkv),
        q_b_proj=None if queries is None else weights.linear(queries),
        o_proj=weights.linear(family.o),
        q_norm=None if queries is None else weights.norm(norm_of(family, "q_lora_rank")),
        kv_norm=weights.norm(norm_of(family, "kv_lora_rank")),
        key_up=key_up,
        value_up=value_up,
        scale=(shape.nope + shape.rope) ** -0.5 * score_factor(config.ropes[weights.number]),
        query_scales=query_scales,
        indexer=weights.indexer(),
        selection=selection if weights.selects_keys else None,
        gates=None if family.head_gates is None else weights.linear(family.head_gates),
        kernel=weights.kernels.get("attention"),
    )


def score_factor(rope: RopeConfig | None) -> float:
    """Return YaRN's factor of attention scores, which is separate from that of cos and sin."""
    if rope is None or rope.type != "yarn":
        return 1.0
    every = rope.parameters.get("mscale_all_dim") or 0
    return yarn_magnitude(rope.parameters["factor"], every) ** 2
