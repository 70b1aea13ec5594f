"""Functions of rows with experts: what files state in another way than config.json.

Functions of `more_config` read metadata, those of `more_metadata` write them. Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.layers import REMEDY, dense_first, dense_layers, shared_width


def mellum_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return experts in all layers, and RoPE parameters of layers with and without a window."""
    theta = config["rope_theta"]
    full = {"rope_type": "default", **config.get("rope_scaling", {}), "rope_theta": theta}
    local = float(metadata.number("rope.freq_base_swa", theta))
    sliding = {"rope_type": "default", "rope_theta": local}
    ropes = {"full_attention": full, "sliding_attention": sliding}
    return {**dense_first(metadata, config), "rope_parameters": ropes}


def mellum_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no more metadata. Raises CheckpointError for what llama.cpp's Mellum is not."""
    if dense_layers(config):
        raise CheckpointError(
            "config.json mlp_layer_types", "expected experts in all layers", REMEDY
        )
    ropes = config.get("rope_parameters") or {}
    thetas = {each["rope_theta"] for each in ropes.values() if isinstance(each, Mapping)}
    if len(thetas) > 1:
        raise CheckpointError(
            "config.json rope_parameters",
            f"expected one rope_theta in all layers, found {sorted(thetas)}",
            REMEDY,
        )
    return {}


def ernie_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of ERNIE's shared experts, and the layers with experts."""
    return {
        **shared_width(config),
        "interleave_moe_layer_step": config.get("moe_layer_interval", 1),
        "leading_dense_block_count": config.get("moe_layer_start_index", 1),
    }


def hunyuan_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the width of Hunyuan's experts, which the shared one has, too."""
    width = config["intermediate_size"]
    return {
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "expert_shared_count": 1,
    }


def phimoe_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the epsilon of LayerNorm under the key of RMSNorm's, where llama.cpp reads it."""
    return {"attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"])}


def gpt_oss_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no more metadata. Raises CheckpointError for YaRN with whole bounds.

    Files do not state whether bounds are whole, and are read as the published models.
    """
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "yarn" and rope.get("truncate", True):
        raise CheckpointError(
            "config.json truncate", "expected false in rope_parameters, as in gpt-oss", REMEDY
        )
    return {}


def llama4_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Llama 4's widths, its layers with experts, and the values that follow from them."""
    every, count = metadata.size("interleave_moe_layer_step"), config["num_hidden_layers"]
    return {
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.size("feed_forward_length"),
        "interleave_moe_layer_step": every,
        "moe_layers": list(range(every - 1, count, every)),
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(count)],
        # llama.cpp decides by the number of experts
        "use_qk_norm": metadata.size("expert_count") != 128,
    }


def llama4_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Llama 4's widths, and how often a layer has experts. Raises CheckpointError."""
    count, dense = config["num_hidden_layers"], set(config["mlp_only_layers"])
    sparse = [layer for layer in range(count) if layer not in dense]
    every = sparse[0] + 1 if sparse else 1
    if sparse != list(range(every - 1, count, every)):
        raise CheckpointError(
            "config.json moe_layers", "expected every n-th layer, from layer n - 1", REMEDY
        )
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": every,
    }
