"""Older families: sizes that their code fixes or that their own keys imply."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import inner_width, known_sizes
from formats.errors import CheckpointError

BLOOM_LENGTH = 2048  # length in training; ALiBi has no limit


def gpt_bigcode(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads")
    kv_heads = 1 if config.get("multi_query", True) else heads
    return {**inner_width("n_inner")(config), **known_sizes(num_key_value_heads=kv_heads)}


def falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return KV heads and norms.

    With new_decoder_architecture (40B), num_kv_heads is the number of KV heads. Otherwise
    multi_query (7B) means one KV head. Each variant ignores the other's key.
    """
    is_new, norms = config.get("new_decoder_architecture"), config.get("num_ln_in_parallel_attn")
    kv_heads = config.get("num_attention_heads")
    if is_new:
        kv_heads = config.get("num_kv_heads") or kv_heads
    elif config.get("multi_query", True):
        kv_heads = 1
    return {
        **inner_width("ffn_hidden_size")(config),
        **known_sizes(num_key_value_heads=kv_heads),
        "num_ln_in_parallel_attn": norms or (2 if is_new else 1),
    }


def bloom(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that transformers' code fixes, and the length."""
    stated = (config.get(key) for key in ("max_position_embeddings", "seq_length"))
    return {
        **_four_times(config),
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": next(filter(is_size, stated), BLOOM_LENGTH),
    }


def mpt(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_four_times(config), "hidden_act": "gelu"}


def gpt_neo(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, which the file states as patterns with repetitions."""
    patterns = config.get("attention_types")
    patterns = [[["global", "local"], 12]] if patterns is None else patterns
    try:
        kinds = [kind for kinds, count in patterns for kind in kinds * min(count, MAX_LAYERS)]
    except (TypeError, ValueError):
        kinds = []
    names = {"global": "full_attention", "local": "sliding_attention"}
    if len(kinds) != config.get("num_hidden_layers") or not set(kinds) <= set(names):
        raise CheckpointError(
            "config.json attention_types",
            f"expected global or local for each of {config.get('num_hidden_layers')} layers, found"
            f" {patterns!r:.100}",
            "copy it from the float model",
        )
    inner = inner_width("intermediate_size")(config)
    return {**inner, "layer_types": [names[kind] for kind in kinds]}


def _four_times(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes: a feed-forward 4 times the hidden size, and as many KV heads as heads."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    inner = 4 * hidden if is_size(hidden) else None
    return known_sizes(intermediate_size=inner, num_key_value_heads=heads)


def minicpm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Granite's factors of embeddings, branches, scores and logits for MiniCPM's keys.

    Raises CheckpointError for a model with experts.
    """
    if not any(key in config for key in ("scale_emb", "scale_depth", "dim_model_base")):
        return {}
    if config.get("num_experts"):
        raise CheckpointError(
            "config.json num_experts",
            f"expected no experts, found {config['num_experts']!r:.80}: they are not supported",
            "use a model of the family without them",
        )
    layers, hidden, heads = (
        config.get(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    base, depth = config.get("dim_model_base", 1), config.get("scale_depth", 1)
    if not (is_size(layers) and is_size(hidden) and is_size(heads) and is_size(base)):
        return {}
    if type(depth) not in (int, float):
        return {}
    return {
        "embedding_multiplier": config.get("scale_emb", 1),
        "residual_multiplier": depth / layers**0.5,
        "attention_multiplier": (config.get("head_dim") or hidden // heads) ** -0.5,
        "logits_scaling": hidden / base,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
