"""LFM2, LFM2-MoE and LFM3: short convolution layers, and some attention layers with head norms.

In LFM3 some attention layers have a window, heads have gates, and branches end with norms. The
family's row has the other differences: names, the width of the MLP, experts.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.blocks.states.short_conv import ShortConv
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe, uneven
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    family = config.family
    if config.state_layers[weights.number]:
        mixer = build_short_conv(config, weights)
    else:
        q_norm, k_norm = (weights.norm(norm.name) for norm in family.norms if norm.of_attention)
        build = llama.build_attention if family.head_gates is None else uneven.build_attention
        mixer = build(config, weights, q_norm=q_norm, k_norm=k_norm)
    return Layer(
        attention_norm=llama.build_norm(config, weights, "operator_norm"),
        attention=mixer,
        attention_end=_end(config, weights, "post_operator_norm"),
        mlp_norm=llama.build_norm(config, weights, "ffn_norm"),
        mlp=(llama if family.experts is None else moe).build_mlp(config, weights),
        mlp_end=_end(config, weights, "post_ffn_norm"),
    )


def _end(config: ModelConfig, weights: LayerWeights, name: str) -> BranchEnd:
    """Return the end of a branch. In LFM3 the branch ends with a norm."""
    norm = llama.build_norm(config, weights, name) if weights.has_norm(name) else None
    return BranchEnd(norm)


def build_short_conv(config: ModelConfig, weights: LayerWeights) -> ShortConv:
    family = config.family.state_mixer
    return ShortConv(
        in_proj=weights.state_linear(family.inputs),
        out_proj=weights.state_linear(family.out),
        kernel=weights.kernels.get("states"),
        **weights.state_tensors(),
    )
