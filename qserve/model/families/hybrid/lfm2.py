"""LFM2 and LFM2-MoE: short convolutions, and attention in some layers; norms over heads.

Columns of the family's row hold what differs: names, the width of the feed-forward, experts.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.states.short_conv import ShortConv
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    if config.state_layers[weights.number]:
        mixer = build_short_conv(config, weights)
    else:
        mixer = llama.build_attention(
            config,
            weights,
            q_norm=weights.norm("self_attn.q_layernorm"),
            k_norm=weights.norm("self_attn.k_layernorm"),
        )
    has_experts = config.family.experts is not None
    return Layer(
        attention_norm=llama.build_norm(config, weights, "operator_norm"),
        attention=mixer,
        mlp_norm=llama.build_norm(config, weights, "ffn_norm"),
        mlp=(moe if has_experts else llama).build_mlp(config, weights),
    )


def build_short_conv(config: ModelConfig, weights: LayerWeights) -> ShortConv:
    family = config.family.state_mixer
    return ShortConv(
        in_proj=weights.state_linear(family.inputs),
        out_proj=weights.state_linear(family.out),
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
    )
