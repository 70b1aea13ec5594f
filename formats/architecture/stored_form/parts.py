"""Values that several published files lack."""

from collections.abc import Callable, Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size


def inner_width(key: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that fills in the width of a feed-forward: 4 times the hidden size."""

    def derive(config: Mapping[str, Any]) -> dict[str, Any]:
        hidden = config.get("hidden_size")
        return {key: 4 * hidden} if config.get(key) is None and is_size(hidden) else {}

    return derive


def expert_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers with experts; published files state the number of layers without."""
    count, first = config.get("num_hidden_layers"), config.get("first_k_dense_replace", 1)
    if config.get("mlp_layer_types") is not None or not is_size(count) or type(first) is not int:
        return {}
    layers, stated = range(min(count, MAX_LAYERS)), config.get("is_moe_layer")
    if isinstance(stated, list):  # K-EXAONE's
        kinds = ("dense", "sparse")
        return {"mlp_layer_types": [kinds[bool(each)] for each in stated[: len(layers)]]}
    return {"mlp_layer_types": ["dense" if i < first else "sparse" for i in layers]}


def known_sizes(**values: Any) -> dict[str, Any]:
    """Return only the values that are sizes; others are config errors, reported elsewhere."""
    return {key: value for key, value in values.items() if is_size(value)}
