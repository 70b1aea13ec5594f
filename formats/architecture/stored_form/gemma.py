"""Gemma 3n and Gemma 4: defaults of transformers; heads and widths that files state by layer."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import known_sizes
from formats.errors import CheckpointError


def gemma3n(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of all feed-forwards, which files list by layer, and transformers' defaults.

    Raises CheckpointError if layers have different widths.
    """
    found, inner = {}, config.get("intermediate_size")
    if isinstance(inner, list) and inner:
        if any(each != inner[0] for each in inner):
            raise CheckpointError(
                "config.json intermediate_size",
                f"expected the same width in each layer, found {inner!r:.80}",
                "use a model whose layers are alike",
            )
        found["intermediate_size"] = inner[0]
    return {
        **found,
        **known_sizes(
            altup_num_inputs=config.get("altup_num_inputs", 4),
            laurel_rank=config.get("laurel_rank", 64),
            hidden_size_per_layer_input=config.get("hidden_size_per_layer_input", 256),
            vocab_size_per_layer_input=config.get("vocab_size_per_layer_input", 262144),
            global_head_dim=config.get("head_dim", 256),
            num_global_key_value_heads=config.get("num_key_value_heads", 2),
        ),
    }


def gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults, and the heads of layers with full attention.

    Files state these heads as separate keys, or by layer in `per_layer_config`.
    """
    count, types = config.get("num_hidden_layers"), config.get("layer_types")
    by_layer = config.get("per_layer_config")
    by_layer = by_layer if isinstance(by_layer, Mapping) else {}
    found: dict[str, Any] = {}
    if not isinstance(types, list) and is_size(count):
        kinds = ("sliding_attention",) * 5 + ("full_attention",)
        types = [kinds[layer % 6] for layer in range(min(count, MAX_LAYERS))]
        found["layer_types"] = [*types[:-1], "full_attention"]
    own = next((each for each in by_layer.values() if isinstance(each, Mapping)), {})
    keys_are_values = config.get("attention_k_eq_v", False)
    # transformers uses the stated number only if keys are also the values
    heads = config.get("num_global_key_value_heads") if keys_are_values else None
    heads = own.get("num_key_value_heads") or heads or config.get("num_key_value_heads", 4)
    return {
        **found,
        "attention_k_eq_v": keys_are_values,
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input", 256),
        **known_sizes(
            vocab_size_per_layer_input=config.get("vocab_size_per_layer_input", 262144),
            global_head_dim=own.get("head_dim") or config.get("global_head_dim") or 512,
            num_global_key_value_heads=heads,
        ),
    }
