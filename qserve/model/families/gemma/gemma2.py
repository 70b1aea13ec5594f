"""Gemma 2 and VaultGemma: attention with a soft cap, norms before attention and MLP; Gemma 2 also
has norms after them.

The family's row has the other differences from Llama: norm weights stored minus 1, embeddings times
sqrt(C), GELU gates, a soft cap on logits, sliding windows in every second layer.
"""

from typing import Any

from formats.errors import InputError
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import BranchEnd
from qserve.model.decoder import Decoder
from qserve.model.families import llama
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    check_causal(config)
    return llama.build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights, **head_norms: Any) -> Layer:
    """Build a layer. `head_norms`: q_norm and k_norm, for families that have them."""
    values = config.values
    return Layer(
        attention_norm=llama.build_norm(config, weights, "input_layernorm"),
        attention=llama.build_attention(
            config,
            weights,
            scale=values["query_pre_attn_scalar"] ** -0.5,
            soft_cap=values["attn_logit_softcapping"],
            **head_norms,
        ),
        attention_end=_end(config, weights, "post_attention_layernorm"),
        mlp_norm=llama.build_norm(config, weights, "pre_feedforward_layernorm"),
        mlp=llama.build_mlp(config, weights),
        mlp_end=_end(config, weights, "post_feedforward_layernorm"),
    )


def _end(config: ModelConfig, weights: LayerWeights, name: str) -> BranchEnd:
    """Return the end of a branch, with the norm `name` if the model has it."""
    norm = llama.build_norm(config, weights, name) if weights.has_norm(name) else None
    return BranchEnd(norm)


def check_causal(config: ModelConfig) -> None:
    """Raise InputError for Gemma-based embedding models, whose attention is not causal."""
    if config.values.get("use_bidirectional_attention"):
        raise InputError(
            "config.json use_bidirectional_attention",
            "expected false, found true: a model of this kind does not generate text",
            "serve a Gemma model that generates text",
        )
