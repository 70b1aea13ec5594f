"""Granite 4 (hybrid): Mamba-2 layers and some attention layers, with Granite's factors."""

import math
from typing import Any

from formats.architecture.sizes import stated_size
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.blocks.states.mamba2 import Mamba2, MambaShape
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    end = BranchEnd(factor=config.values["residual_multiplier"])
    if config.state_layers[weights.number]:
        mixer = build_mamba(config, weights)
    else:
        scale = config.values["attention_multiplier"]
        mixer = llama.build_attention(config, weights, scale=scale)
    has_experts = config.family.experts is not None
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=mixer,
        attention_end=end,
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
        mlp_end=end,
    )


def build_mamba(
    config: ModelConfig,
    weights: LayerWeights,
    shape: MambaShape | None = None,
    **different: Any,
) -> Mamba2:
    """Build a Mamba-2 mixer. Without `shape`, its sizes are those of config.json.

    `different`: additional arguments of Mamba2.
    """
    family = config.family.state_mixer
    return Mamba2(
        shape or mamba_shape(config, weights),
        in_proj=weights.state_linear(family.inputs),
        out_proj=weights.state_linear(family.out),
        norm_over_ranks=weights.group_norm_over_ranks(),
        eps=config.norm_eps,
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
        **different,
    )


def mamba_shape(
    config: ModelConfig, weights: LayerWeights, step_limits: tuple[float, float] | None = None
) -> MambaShape:
    """Return the mixer's sizes on this rank. Without `step_limits`, config.json states them."""
    values, shard = config.values, weights.state_shard
    least, most = step_limits or values["time_step_limit"] or (0.0, math.inf)
    return MambaShape(
        heads=shard.num_heads,
        head_dim=values["mamba_d_head"],
        groups=shard.num_groups,
        state=stated_size(values, "mamba_d_state"),
        taps=stated_size(values, "mamba_d_conv"),
        step_limits=(least, most),
    )
