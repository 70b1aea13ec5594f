"""Qwen3-Next and Qwen3.5 (text): gated delta nets, and gated attention in every fourth layer.

The family's row has the differences: how the projections of the nets are stored, experts. Norm
weights are stored minus 1, except the norm inside a net. Rotary embedding covers a quarter of each
head.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.states.delta_net import DeltaNet, DeltaShape
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    if config.state_layers[weights.number]:
        mixer = build_delta_net(config, weights)
    else:
        mixer = llama.build_attention(
            config,
            weights,
            q_norm=weights.norm("self_attn.q_norm"),
            k_norm=weights.norm("self_attn.k_norm"),
        )
    has_experts = config.family.experts is not None
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=mixer,
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
    )


def build_delta_net(
    config: ModelConfig,
    weights: LayerWeights,
    *,
    eps: float | None = None,
    write_factor: float = 1.0,
) -> DeltaNet:
    """Build a gated delta net. `eps` is that of its norm; without it, that of the other norms."""
    family = config.family.state_mixer
    return DeltaNet(
        delta_shape(config, weights),
        in_proj=weights.state_linear(family.inputs),
        gates=weights.state_linear(family.gates),
        out_proj=weights.state_linear(family.out),
        eps=config.norm_eps if eps is None else eps,
        write_factor=write_factor,
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
    )


def delta_shape(config: ModelConfig, weights: LayerWeights) -> DeltaShape:
    """Return the delta net's sizes on this rank."""
    values, shard = config.values, weights.state_shard
    return DeltaShape(
        key_heads=shard.num_groups,
        value_heads=shard.num_heads,
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        taps=values["linear_conv_kernel_dim"],
    )
