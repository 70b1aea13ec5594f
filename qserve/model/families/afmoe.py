"""AFMoE (Trinity), PLaMo 3, Muse Glimmer: norms before and after attention and MLP, and of heads.

The family's row has the other differences from Llama: names, experts and the routing rule, layers
with windows, their rotary embeddings, and the linear that computes gates of attention. In Muse
Glimmer norms of heads have no weights, scores have a factor, and norms after attention and MLP have
their own epsilon.
"""

from typing import Any

import torch

from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd, Norm
from qserve.model.blocks.states.state import StateBlock
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return llama.build_decoder(config, weights, build_layer)


def build_layer(
    config: ModelConfig, weights: LayerWeights, mixer: StateBlock | None = None
) -> Layer:
    """Build a layer. `mixer`: a mixer with states instead of attention."""
    before, after, before_mlp, after_mlp, *of_heads = (norm.name for norm in config.family.norms)
    if mixer is None:
        mixer = llama.build_attention(config, weights, **_of_heads(config, weights, of_heads))
    build_mlp = moe.build_mlp if config.family.experts else llama.build_mlp
    return Layer(
        attention_norm=llama.build_norm(config, weights, before),
        attention=mixer,
        attention_end=_end(config, weights, after),
        mlp_norm=llama.build_norm(config, weights, before_mlp),
        mlp=build_mlp(config, weights),
        mlp_end=_end(config, weights, after_mlp),
    )


def _of_heads(config: ModelConfig, weights: LayerWeights, names: list[str]) -> dict[str, Any]:
    """Return the norms of queries and keys, and the scale of scores if the config states one."""
    if config.family.head_norms:
        return weights.head_norms()
    plain = weights.constant(torch.ones(config.head_dim))
    q_norm, k_norm = (weights.norm(name) for name in names) if names else (plain, plain)
    factor = config.values.get("qk_scale_factor")
    scale = {} if factor is None else {"scale": factor * config.head_dim**-0.5}
    return {"q_norm": q_norm, "k_norm": k_norm, **scale}


def _end(config: ModelConfig, weights: LayerWeights, name: str) -> BranchEnd:
    eps = config.values.get("post_norm_eps", config.norm_eps)
    return BranchEnd(Norm(weights.norm(name), eps, config.family.norm_kind))
