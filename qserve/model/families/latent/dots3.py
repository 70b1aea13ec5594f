"""dots3-note: latent attention in two geometries, experts, and a gate for each head.

Layers with an indexer see all of the context, or the keys that it selects. The others have a
window. Indexers are loaded only if contexts may be longer than the number of keys that one selects.
"""

import torch

from formats.architecture.rows.dots import KEY_NORM
from formats.architecture.rows.latent_parts import queries_of
from qserve.model.blocks.latent.attention import LatentAttention, LatentShape
from qserve.model.blocks.latent.indexer import Selection
from qserve.model.blocks.latent.window import SharedWindow, Window
from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    windows = [size for size in config.windows if size is not None]
    shared = SharedWindow(windows[0]) if windows else None
    numbers = range(config.num_layers)
    if weights.pipeline is not None:
        numbers = weights.pipeline.layers(config.num_layers)
    first = next((n for n in numbers if config.windows[n] is not None), None)

    def build_one(config: ModelConfig, layer: LayerWeights) -> Layer:
        window = None
        if config.windows[layer.number] is not None:
            window = Window(shared=shared, is_first=layer.number == first)
        return build_layer(layer, window)

    return llama.build_decoder(config, weights, build_one)


def build_layer(weights: LayerWeights, window: Window | None) -> Layer:
    local = weights.config
    return Layer(
        attention_norm=llama.build_norm(local, weights, "input_layernorm"),
        attention=_build_attention(local, weights, window),
        mlp_norm=llama.build_norm(local, weights, "post_attention_layernorm"),
        mlp=moe.build_mlp(local, weights),
    )


def _build_attention(
    config: ModelConfig, weights: LayerWeights, window: Window | None
) -> LatentAttention:
    family, values = config.family, config.values
    widths = "" if window is None else "local_"
    shape = LatentShape(
        heads=config.num_heads,
        nope=values[f"{widths}qk_nope_head_dim"],
        rope=values["qk_rope_head_dim"],
        value=values["v_head_dim"],
        latent=values[f"{widths}kv_lora_rank"],
    )
    queries = queries_of(family)
    key_up, value_up = weights.absorbed(shape)
    indexer = weights.indexer() if window is None else None
    return LatentAttention(
        shape,
        rotary=weights.rotary,
        qkv_proj=weights.linear(family.qkv),
        q_b_proj=weights.linear(queries),
        o_proj=weights.linear(family.o),
        q_norm=_scaled_norm(config, weights, queries.inputs),
        kv_norm=_scaled_norm(config, weights, family.latent[-1].inputs),
        key_norm=weights.norm(KEY_NORM),
        key_up=key_up,
        value_up=value_up,
        scale=(shape.nope + shape.rope) ** -0.5,
        norm_eps=config.norm_eps,
        window=window,
        indexer=indexer,
        selection=None if indexer is None else Selection(),
        gates=weights.linear(family.head_gates),
        kernel=weights.kernels.get("attention"),
    )


def _scaled_norm(config: ModelConfig, weights: LayerWeights, size: str) -> torch.Tensor:
    """Return the weight of the norm of latents with this size, times their factor, in float32."""
    name = next(norm.name for norm in config.family.norms if norm.size == size)
    factor = (config.hidden_size / config.values[size]) ** 0.5
    return weights.norm(name).float() * factor
