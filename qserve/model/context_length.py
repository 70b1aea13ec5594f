"""Maximum context length of a model, from config.json."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import InputError
from qserve.model.rope import RopeConfig

MAX_LENGTH = 2**31 - 1
# The same keys as in vLLM. If a config has several of them, the smallest value counts.
KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Rope scaling types whose config states the length before scaling. With "llama3" and "longrope" it
# is the length after scaling; "dynamic" would change cached keys (RopeConfig.check_length).
STRETCHING = ("linear", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """Maximum length of prompt plus output, and where it comes from."""

    length: int
    source: str

    @classmethod
    def of(
        cls, stated: Mapping[str, Any], default: int, ropes: Iterable[RopeConfig | None]
    ) -> "ContextLength":
        """Determine the length. `stated`: config.json as written; `default`: transformers' default.

        Raises InputError if a scaled rope covers more positions than int32 can count.
        """
        found = {key: stated[key] for key in KEYS if _is_length(stated.get(key))}
        key = min(found, key=found.__getitem__) if found else None
        length, source = found.get(key, default), key or "the default of its model type"
        scaled = [(_stretched(rope, length), rope) for rope in ropes if rope is not None]
        if not scaled:
            return cls(length=min(length, MAX_LENGTH), source=source)
        # If layers have different ropes, such as layers with windows, the longest reach counts.
        reach, rope = max(scaled, key=lambda pair: pair[0])
        if reach != length:
            source += f", {rope.type} rope scaling by {rope.parameters['factor']:g}"
        if reach > MAX_LENGTH:
            raise InputError(
                "config.json",
                f"expected at most {MAX_LENGTH} positions, found {reach:.3g} ({source})",
                "copy config.json from the float model",
            )
        return cls(length=reach, source=source)


def _is_length(value: object) -> bool:
    return type(value) is int and value > 0


def _stretched(rope: RopeConfig, length: int) -> int:
    """Return the number of positions that a scaled rope covers."""
    if rope.type not in STRETCHING:
        return length
    original = rope.parameters.get("original_max_position_embeddings")
    return int((original or length) * rope.parameters["factor"])
