"""Families with Mamba-1, and Mamba without attention: sizes of mixers, and layer types."""

import math
from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS
from formats.architecture.sizes import is_size
from formats.architecture.stored_form import hybrids
from formats.architecture.stored_form.parts import known_sizes

# Mamba has no longest context, so files state none. Published models were trained on as many.
UNSTATED_LENGTH = 8192
_DEFAULTS = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
# (key of a period, of an offset) -> their defaults in Jamba
_ATTENTION = {"attn_layer_period": 8, "attn_layer_offset": 4}
_EXPERTS = {"expert_layer_period": 2, "expert_layer_offset": 1}


def mamba(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of mixers, and values for attention, which no layer has."""
    found = _mixer(config)
    stated = config.get("intermediate_size")
    if is_size(stated):  # files state it next to the factor, and it counts
        found["mamba_channels"] = stated
    if "mamba_channels" in found:
        found["intermediate_size"] = found["mamba_channels"]
    return {**found, **_no_attention(config), "head_dim": 1}


def mamba_2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of Mamba-2 mixers, and values for attention, which no layer has."""
    defaults = {
        **{"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8},
        **{"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
    }
    found = {key: config.get(key, default) for key, default in defaults.items()}
    heads, width = found["mamba_n_heads"], found["mamba_d_head"]
    if is_size(heads) and is_size(width):
        found["intermediate_size"] = heads * width
    return {**found, **hybrids.mamba({**config, **found}), **_no_attention(config)}


def _no_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that every config has, for models that have no attention."""
    length = config.get("max_position_embeddings")
    return {
        **{"num_attention_heads": 1, "num_key_value_heads": 1},
        "max_position_embeddings": UNSTATED_LENGTH if length is None else length,
    }


def jamba(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of mixers, and the layers with attention and with experts."""
    found, count = _mixer(config), config.get("num_hidden_layers", 32)
    attention, sparse = (_layers_of(config, keys, count) for keys in (_ATTENTION, _EXPERTS))
    if attention is None or sparse is None:
        return found
    has_experts = config.get("num_experts", 16) != 1
    kinds = ["sparse" if has_experts and i in sparse else "dense" for i in _numbers(count)]
    return {**found, "attn_layer_indices": attention, "mlp_layer_types": kinds}


def _layers_of(config: Mapping[str, Any], keys: Mapping[str, int], count: Any) -> list[int] | None:
    """Return the layers that a period and an offset select; None if a value is no number."""
    period, offset = (config.get(key, default) for key, default in keys.items())
    if not (is_size(count) and is_size(period) and type(offset) is int):
        return None
    return [i for i in _numbers(count) if i % period == offset]


def _numbers(count: int) -> range:
    return range(min(count, MAX_LAYERS))


def _mixer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of Mamba-1 mixers, with transformers' defaults."""
    found = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    hidden, expand = config.get("hidden_size"), found["mamba_expand"]
    if not is_size(hidden):
        return found
    if config.get("mamba_dt_rank", "auto") == "auto":
        found["mamba_dt_rank"] = math.ceil(hidden / 16)
    if isinstance(expand, int | float) and 0 < expand < math.inf:
        found |= known_sizes(mamba_channels=int(expand * hidden))
    return found
