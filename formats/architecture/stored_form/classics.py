"""Older families: sizes that their code fixes or that their own keys imply."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import inner_width, known_sizes

BLOOM_LENGTH = 2048  # of training; ALiBi has no limit


def gpt_bigcode(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads")
    kv_heads = 1 if config.get("multi_query", True) else heads
    return {**inner_width("n_inner")(config), **known_sizes(num_key_value_heads=kv_heads)}


def falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return KV heads and norms: 40B has its own number, 7B one, both whatever the other says."""
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


def _four_times(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a feed-forward 4 times as wide as the hidden size, and of attention
    with as many KV heads as heads.
    """
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    inner = 4 * hidden if is_size(hidden) else None
    return known_sizes(intermediate_size=inner, num_key_value_heads=heads)
