"""Layers of a draft head with attention, as config.json states them in both layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from formats.errors import CheckpointError

ORIGINAL, SPECULATORS = "original", "speculators"
NESTED, KIND_KEY = "transformer_layer_config", "speculators_model_type"
COPY_HEAD = "copy config.json from the published head"
LAYER_TYPES = ("llama", "qwen2", "qwen3", "mistral")  # Llama's layers, some with QK norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersConfig:
    """Sizes of a head's layers."""

    layout: Literal["original", "speculators"]
    values: Mapping[str, Any]  # config of the layers, in the keys of a Llama model
    target_hidden_size: int
    draft_vocab_size: int

    @property
    def hidden_size(self) -> int:
        return self.values["hidden_size"]

    @property
    def vocab_size(self) -> int:
        return self.values["vocab_size"]

    @property
    def intermediate_size(self) -> int:
        return self.values["intermediate_size"]

    @property
    def num_layers(self) -> int:
        return self.values.get("num_hidden_layers", 1)

    @property
    def num_heads(self) -> int:
        return self.values["num_attention_heads"]

    @property
    def num_kv_heads(self) -> int:
        return self.values.get("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        return self.values.get("head_dim") or self.hidden_size // self.num_heads

    @property
    def norm_eps(self) -> float:
        return self.values.get("rms_norm_eps", 1e-6)


def layers_of(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of LayersConfig. Raises CheckpointError, naming the key.

    `stated`: the config with the keys of its inner objects.
    """
    nested = config.get(NESTED)
    layout = SPECULATORS if KIND_KEY in config else ORIGINAL
    if layout == SPECULATORS and not isinstance(nested, dict):
        raise CheckpointError(
            f"config.json {NESTED}", f"expected an object, found {nested!r:.80}", COPY_HEAD
        )
    values = dict(nested) if layout == SPECULATORS else dict(config)
    values.setdefault("num_hidden_layers", 1)
    values.setdefault("model_type", "llama")
    if values["model_type"] not in LAYER_TYPES:
        raise CheckpointError(
            "config.json model_type",
            f"expected a head of {', '.join(LAYER_TYPES)} layers, found {values['model_type']!r}",
            "use another head",
        )
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        whole(values, key)
    for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        if values.get(key) is not None:
            whole(values, key)
    if values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            "config.json hidden_act",
            f"expected 'silu', found {values['hidden_act']!r}",
            "use another head",
        )
    return {
        "layout": layout,
        "values": values,
        "target_hidden_size": whole(stated, "target_hidden_size", values["hidden_size"]),
        "draft_vocab_size": whole(stated, "draft_vocab_size", values["vocab_size"]),
    }


def numbers(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Read a list of integers; a missing one is empty. Raises CheckpointError."""
    found = config.get(key) or []
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise CheckpointError(
            f"config.json {key}", f"expected numbers, found {found!r:.80}", COPY_HEAD
        )
    return tuple(found)


def whole(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """Read an integer. Raises CheckpointError."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise CheckpointError(
            f"config.json {key}",
            f"expected a number of {least} or more, found {value!r:.80}",
            COPY_HEAD,
        )
    return value


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Read a boolean. Raises CheckpointError."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not bool:
        raise CheckpointError(
            f"config.json {key}", f"expected true or false, found {value!r:.80}", COPY_HEAD
        )
    return value
