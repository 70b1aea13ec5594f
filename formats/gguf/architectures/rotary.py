"""Rotary embeddings that differ from those of other architectures: Ministral 3, Granite SWA."""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.writing.container_writer import Value

PATTERN = "attention.rope_pattern"  # for each layer, True if it rotates
REMEDY = "write another format"


def ministral3_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of YaRN and of the factors of scores, if the file states them.

    Mistral Small 3 has neither. The default RoPE type is then stated explicitly, because the config
    class would use YaRN.
    """
    scaling = dict(config.get("rope_scaling") or {})
    temperature = metadata.number("attention.temperature_scale")
    every = metadata.number("rope.scaling.yarn_log_multiplier")
    if not scaling:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
    if scaling.get("rope_type") != "yarn":
        return {}
    if every:
        scaling |= {"mscale": 1.0, "mscale_all_dim": float(every)}
    if temperature:
        scaling["llama_4_scaling_beta"] = float(temperature)
    return {"rope_scaling": {**scaling, "rope_theta": config["rope_theta"]}}


def ministral3_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the factors of scores. Raises CheckpointError for a first one that is not 1."""
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    every, first = scaling.get("mscale_all_dim"), scaling.get("mscale") or 1.0
    if every and first != 1.0:
        raise CheckpointError(
            "config.json mscale",
            f"expected 1.0, which GGUF takes for granted, found {first}",
            REMEDY,
        )
    found = {
        "rope.scaling.yarn_log_multiplier": every,
        "attention.temperature_scale": scaling.get("llama_4_scaling_beta"),
    }
    return {key: Value(type="f32", value=value) for key, value in found.items() if value}


def granite_swa_config(metadata: Any) -> Mapping[str, Any]:
    """Return theta of each layer; 0: the layer has no RoPE."""
    layers = metadata.size("block_count")
    stated = metadata.get(PATTERN)
    rotates = stated if isinstance(stated, list) else [True if stated is None else stated] * layers
    if len(rotates) != layers:
        raise metadata.wrong(PATTERN, f"expected {layers} values, found {len(rotates)}")
    theta = float(metadata.number("rope.freq_base", 10000.0))
    return {"layer_rope_theta": [theta if each else 0.0 for each in rotates]}


def granite_swa_metadata(
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the layers with RoPE. Raises CheckpointError if they differ in theta."""
    thetas = config["layer_rope_theta"]
    found = sorted({theta for theta in thetas if theta})
    if len(found) > 1:
        raise CheckpointError(
            "config.json layer_rope_theta",
            f"expected one theta in all layers that rotate, found {found!r:.60}",
            REMEDY,
        )
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys = {
        "rope.freq_base": Value(type="f32", value=float(found[0] if found else 10000.0)),
        "rope.dimension_count": Value(type="u32", value=width),
        PATTERN: Value(type="bool", value=[bool(theta) for theta in thetas]),
    }
    return keys, {}
