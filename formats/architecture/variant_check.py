"""Checks of a config.json: unsupported variants of a family, and the number of layers."""

import json
from collections.abc import Mapping
from typing import Any

from formats.architecture.family import MAX_LAYERS, Family
from formats.architecture.sizes import MAX_EXPERTS, NUM_EXPERTS_KEYS, is_size
from formats.errors import CheckpointError


def check_variant(family: Family, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a key asks for a variant that this project does not compute."""
    for key, wanted in family.fixed.items():
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        found = _stated(config, key, allowed[0])
        if found not in allowed and not (isinstance(wanted, bool) and bool(found) is wanted):
            expected = " or ".join(map(json.dumps, allowed))
            raise CheckpointError(
                f"config.json {key}",
                f"expected {expected}, found {json.dumps(found)!s:.80}: this variant"
                f" of {family.architecture} is not supported",
                "use a model of the family without it",
            )
    count = config.get(family.num_layers_key)
    if family.lone_blocks and is_size(count):
        for layer in range(min(count, MAX_LAYERS)):
            family.blocks(config, layer)
    for key in family.like_hidden_size:
        found, wanted = config.get(key), config.get("hidden_size")
        if found is not None and found != wanted:
            raise CheckpointError(
                f"config.json {key}",
                f"expected hidden_size, {wanted}, found {json.dumps(found)!s:.80}: embeddings"
                " that are projected are not supported",
                "use a model of the family without the projections",
            )


def _stated(config: Mapping[str, Any], key: str, missing: Any) -> Any:
    """Return the value of a key; a dotted key names a nested value."""
    *parts, leaf = key.split(".")
    for part in parts:
        config = config.get(part)
        if not isinstance(config, Mapping):
            return missing
    return config.get(leaf, missing)


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if config.json states more layers, or experts, than any model has.

    Readers build lists of all layers; 10^9 layers would take gigabytes.
    """
    limits = {"num_hidden_layers": MAX_LAYERS, **dict.fromkeys(NUM_EXPERTS_KEYS, MAX_EXPERTS)}
    for key, most in limits.items():
        count = config.get(key)
        if isinstance(count, int) and count > most:
            raise CheckpointError(
                f"config.json {key}",
                f"expected {most} or less, found {count}",
                "copy it from the float model",
            )
