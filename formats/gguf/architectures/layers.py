"""Functions that rows share: values by layer, layer types, widths of experts.

Functions of `more_config` read metadata, those of `more_metadata` write them. Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError

REMEDY = "write another format"
_WIDTH = "moe_intermediate_size"
# metadata of layers with states
STATE_SIZES = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank")


def by_layer(metadata: Any, key: str, count: int, *, sizes: bool = False) -> list[Any]:
    """Return a value for each layer of a key that states one, or a list.

    `sizes`: positive whole numbers, as many as there are layers. Without, a missing key is None in
    each layer, and a list may go on for layers that draft. Raises CheckpointError.
    """
    value = metadata.get(key)
    if sizes and not isinstance(value, list):
        value = metadata.size(key)
    values = list(value) if isinstance(value, list) else [value] * count
    if len(values) < count or (sizes and len(values) > count):
        raise metadata.wrong(key, f"expected {count} values, found {len(values)}")
    if sizes and not all(type(each) is int and each > 0 for each in values):
        raise metadata.wrong(key, f"expected positive whole numbers, found {values!r:.60}")
    return values[:count]


def check_sizes(metadata: Any, *keys: str) -> list[int]:
    """Return sizes that a file must state. Raises CheckpointError."""
    return [metadata.size(key) for key in keys]


def dense_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers without experts, which come first. Raises CheckpointError."""
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return config.get("first_k_dense_replace", 0)
    count = next((i for i, kind in enumerate(kinds) if kind == "sparse"), len(kinds))
    if "dense" in kinds[count:]:
        raise CheckpointError(
            "config.json mlp_layer_types", "expected dense layers before all others", REMEDY
        )
    return count


def dense_first(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the type of each layer's feed-forward: the first layers have no experts."""
    first, count = metadata.get("leading_dense_block_count") or 0, config["num_hidden_layers"]
    kinds = ["dense" if layer < first else "sparse" for layer in range(count)]
    found = {"mlp_layer_types": kinds, "first_k_dense_replace": first}
    shared, width = metadata.get("expert_shared_feed_forward_length"), config.get(_WIDTH)
    if metadata.get("expert_shared_count") is None and shared and width:
        found["n_shared_experts"] = shared // width
    return found


def dense_first_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the number of layers without experts, and the width of shared experts."""
    found = {"leading_dense_block_count": dense_layers(config)}
    return found | shared_width(config)


def shared_width(config: Mapping[str, Any]) -> dict[str, int]:
    width, count = config.get(_WIDTH), config.get("n_shared_experts")
    return {"expert_shared_feed_forward_length": width * count} if width and count else {}


def by_kv_heads(kind: str) -> Any:
    """Return a function that reads layer types: layers without KV heads are of type `kind`."""

    def read(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if kind == "conv":
            metadata.size("shortconv.l_cache")
        heads = by_layer(metadata, "attention.head_count_kv", config["num_hidden_layers"])
        return {"layer_types": ["full_attention" if each else kind for each in heads]}

    return read


def kv_heads_metadata(kind: str) -> Any:
    """Return a function that writes layer types: layers of type `kind` have no KV heads."""

    def write(config: Mapping[str, Any]) -> Mapping[str, Any]:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        counts = [0 if each == kind else heads for each in config["layer_types"]]
        return {"attention.head_count_kv": counts}

    return write
