"""Families with latent attention: widths of latents, layers with indexers and experts."""

from collections.abc import Callable, Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import expert_layers


def query_rank(default: int | None) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that fills in the width of queries' latents; null means no latents."""
    return lambda config: {} if "q_lora_rank" in config else {"q_lora_rank": default}


def glm_lite(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**query_rank(768)(config), **expert_layers(config)}


def selecting(rank: int, heads: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that fills in transformers' defaults for attention that selects keys."""

    def derive(config: Mapping[str, Any]) -> dict[str, Any]:
        first = config.get("first_k_dense_replace", 3)
        return {
            **query_rank(rank)(config),
            **expert_layers({**config, "first_k_dense_replace": first}),
            "index_topk": config.get("index_topk", 2048),
            "index_n_heads": config.get("index_n_heads", heads),
            "index_head_dim": config.get("index_head_dim", 128),
            **_indexer_types(config),
        }

    return derive


def _indexer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers of GLM-5 have an indexer, from the keys of its files."""
    count, pattern = config.get("num_hidden_layers"), config.get("index_topk_pattern")
    if config.get("indexer_types") is not None or config.get("model_type") != "glm_moe_dsa":
        return {}
    if isinstance(pattern, str):
        return {"indexer_types": ["full" if kind == "F" else "shared" for kind in pattern]}
    if isinstance(pattern, list):
        return {"indexer_types": pattern}
    every, first = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    if not (is_size(count) and type(every) is int and type(first) is int):
        return {}
    kinds = ("full", "shared")
    layers = range(min(count, MAX_LAYERS))
    own = [max(layer - first + 1, 0) % max(every, 1) for layer in layers]
    return {"indexer_types": [kinds[bool(each)] for each in own]}


def minicpm3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the divisor of logits, and the widths that transformers fills in."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    found = query_rank(768)(config)
    base = config.get("dim_model_base", 256) or hidden
    if is_size(hidden) and is_size(base):
        found["logits_divisor"] = hidden / base
    if config.get("v_head_dim") is None and is_size(hidden) and is_size(heads):
        found["v_head_dim"] = hidden // heads
    return found
