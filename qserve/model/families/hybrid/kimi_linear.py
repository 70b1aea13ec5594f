"""Kimi Linear and Ling 3: Kimi Delta Attention layers, and some latent attention layers.

In Ling 3 latent attention rotates and has a gate per head, the logarithm of decays has a bound, and
decays and gates come from one matrix each.
"""

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.states.kimi_delta import KimiDelta, KimiShape
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.families.latent import deepseek
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights) -> Layer:
    if not config.state_layers[weights.number]:
        return deepseek.build_layer(config, weights)
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=build_mixer(config, weights),
        mlp_norm=llama.build_norm(config, weights, "post_attention_layernorm"),
        mlp=moe.build_mlp(config, weights),
    )


def build_mixer(config: ModelConfig, weights: LayerWeights) -> KimiDelta:
    family, values = config.family.state_mixer, config.values
    tensors = weights.state_tensors()
    if family.gates is None:
        low, f_b, g_b = (weights.gate_linear(each, tensors) for each in family.gate_linears)
    else:
        low, f_b, g_b = weights.state_linear(family.gates), None, None
    return KimiDelta(
        KimiShape(
            heads=weights.state_shard.num_heads,
            head_dim=values["linear_head_dim"],
            taps=values["linear_conv_kernel_dim"],
        ),
        in_proj=weights.state_linear(family.inputs),
        out_proj=weights.state_linear(family.out),
        low=low,
        f_b=f_b,
        g_b=g_b,
        a_log=tensors.pop("a_log").flatten(),
        **tensors,
        eps=config.norm_eps,
        decay_bound=values["kda_lower_bound"] if values.get("kda_safe_gate") else 0.0,
        kernel=weights.kernels.get("states"),
    )
