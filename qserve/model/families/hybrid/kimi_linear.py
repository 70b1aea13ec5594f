"""Kimi Linear: Kimi Delta Attention layers, and some latent attention layers without rope."""

import torch

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.states.kimi_delta import KimiDelta, KimiShape
from qserve.model.decoder import Decoder
from qserve.model.families import deepseek, llama, moe
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
    first = [tensors.pop(key) for key in ("f_a", "g_a", "b")]
    return KimiDelta(
        KimiShape(
            heads=weights.state_shard.num_heads,
            head_dim=values["linear_head_dim"],
            taps=values["linear_conv_kernel_dim"],
        ),
        in_proj=weights.state_linear(family.inputs),
        out_proj=weights.state_linear(family.out),
        low=weights.float_linear(torch.cat(first)),
        f_b=weights.float_linear(tensors.pop("f_b")),
        g_b=weights.float_linear(tensors.pop("g_b")),
        a_log=tensors.pop("a_log").flatten(),
        **tensors,
        eps=config.norm_eps,
        kernel=weights.kernels.get("states"),
    )
