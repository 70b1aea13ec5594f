"""Functions of rows with linear attention: delta nets, lightning attention, Kimi delta attention.

Functions of `more_config` read metadata, those of `more_metadata` write them. Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.layers import (
    REMEDY,
    STATE_SIZES,
    by_kv_heads,
    by_layer,
    check_sizes,
    dense_first,
    dense_layers,
)


def by_intervals(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the layer types of a model with delta nets, and the width of their values."""
    count = config["num_hidden_layers"]
    _, _, groups, heads = check_sizes(metadata, *STATE_SIZES)
    if heads % groups:
        raise metadata.wrong("ssm.time_step_rank", f"expected a multiple of {groups} key heads")
    kinds = _recurrent_kinds(metadata, count, every=4)
    width, rest = divmod(metadata.size("ssm.inner_size"), heads)
    if rest:
        raise metadata.wrong("ssm.inner_size", f"expected {heads} heads of one width")
    return {
        "layer_types": kinds,
        "linear_value_head_dim": width,
    }


def _recurrent_kinds(metadata: Any, count: int, every: int) -> list[str]:
    """Return the layer types of a file; by default every `every`-th layer has attention."""
    recurrent = metadata.get("attention.recurrent_layers")
    if recurrent is None:
        every = metadata.size("full_attention_interval", every)
        recurrent = [(layer + 1) % every != 0 for layer in range(count)]
    else:
        recurrent = by_layer(metadata, "attention.recurrent_layers", count)
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def intervals_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the layer types of a model with delta nets, and the width of all value heads.

    Raises CheckpointError where keys and values have other widths: llama.cpp knows one.
    """
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if keys != values:
        raise CheckpointError(
            "config.json linear_value_head_dim",
            f"expected linear_key_head_dim, {keys}, found {values}: llama.cpp has one width",
            REMEDY,
        )
    kinds = config.get("layer_types")
    every = config.get("full_attention_interval") or 4
    if not isinstance(kinds, list):
        count = config["num_hidden_layers"]
        names = ("full_attention", "linear_attention")
        kinds = [names[(layer + 1) % every != 0] for layer in range(count)]
    rotated = _rotated(config)
    return {
        "ssm.inner_size": values * config["linear_num_value_heads"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        "full_attention_interval": every,
        "rope.dimension_sections": _sections(config, rotated),
    }


def _rotated(config: Mapping[str, Any]) -> int:
    """Return how many channels of a head have RoPE."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 0.25
    return int(width * part)


def _sections(config: Mapping[str, Any], rotated: int) -> list[int]:
    """Return the RoPE pairs for time, height and width: as stated, or three equal parts."""
    stated = (config.get("rope_parameters") or {}).get("mrope_section") or []
    pairs = rotated // 2
    if sum(stated) != pairs:
        third = pairs // 3
        stated = [pairs - 2 * third, third, third]
    return [*stated, 0][:4]


_ALPHAS = tuple(f"{block}_alpha_factor" for block in ("full_attn", "linear_attn", "mlp"))


def minimax_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiniMax-Text-01's layer types, RoPE channels, and factor of the residual stream."""
    factor = metadata.number("residual_scale")
    if factor is None:
        raise metadata.wrong("residual_scale", "is missing")
    kinds = _recurrent_kinds(metadata, config["num_hidden_layers"], every=8)
    rotated = metadata.size("rope.dimension_count", config["head_dim"])
    return {"layer_types": kinds, "rotary_dim": rotated, **dict.fromkeys(_ALPHAS, factor)}


def minimax_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return MiniMax-Text-01's layer types and factor. Raises CheckpointError for other factors."""
    factors = [float(config.get(key, 1.0)) for key in _ALPHAS]
    if len(set(factors)) > 1:
        raise CheckpointError(
            f"config.json {_ALPHAS[1]}",
            f"expected one factor of the residual stream in all blocks, found {factors}",
            REMEDY,
        )
    kinds = config["layer_types"]
    if len(kinds) == 1 and kinds[0] == "linear_attention":
        raise CheckpointError(
            "config.json num_hidden_layers", "expected 2 or more, as in llama.cpp, found 1", REMEDY
        )
    return {
        "residual_scale": factors[0],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
    }


def kimi_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of Kimi Linear's layers, and the heads of its mixers."""
    check_sizes(metadata, "ssm.conv_kernel", "kda.head_dim")
    return {
        **by_kv_heads("linear_attention")(metadata, config),
        **dense_first(metadata, config),
        "linear_num_heads": config["num_attention_heads"],
    }


def kimi_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kinds of Kimi Linear's layers. Raises CheckpointError for other mixers."""
    heads = config["num_attention_heads"]
    if config["linear_num_heads"] != heads:
        raise CheckpointError(
            "config.json linear_num_heads",
            f"expected {heads}, as in attention, found {config['linear_num_heads']}",
            REMEDY,
        )
    kinds = config["layer_types"]
    return {
        "attention.head_count_kv": [0 if each == "linear_attention" else 1 for each in kinds],
        "leading_dense_block_count": dense_layers(config),
    }
