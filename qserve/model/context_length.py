"""How many positions a model is for, by the keys of config.json. Knows no tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qserve.model.rope import RopeConfig

# As vLLM reads them; of several that a config states the smallest counts.
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
# Types of scaling whose config states the length before it. "llama3" and "longrope" state the one
# after it, and "dynamic" would change keys that are cached (RopeConfig.check_length).
STRETCHING = ("linear", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """The longest prompt plus output, and what says so."""

    length: int
    source: str

    @classmethod
    def of(
        cls, stated: Mapping[str, Any], default: int, ropes: Iterable[RopeConfig | None]
    ) -> "ContextLength":
        """`stated`: config.json as it is; `default`: what transformers takes where it says none."""
        found = {key: stated[key] for key in KEYS if _is_length(stated.get(key))}
        key = min(found, key=found.__getitem__) if found else None
        length, source = found.get(key, default), key or "the default of its model type"
        scaled = [(_stretched(rope, length), rope) for rope in ropes if rope is not None]
        if not scaled:
            return cls(length=length, source=source)
        # Of layers that differ, such as those with windows, the one that reaches furthest counts.
        reach, rope = max(scaled, key=lambda pair: pair[0])
        if reach != length:
            source += f", {rope.type} rope scaling by {rope.parameters['factor']:g}"
        return cls(length=reach, source=source)


def _is_length(value: object) -> bool:
    return type(value) is int and value > 0


def _stretched(rope: RopeConfig, length: int) -> int:
    """The positions that a scaled rotation is for."""
    if rope.type not in STRETCHING:
        return length
    original = rope.parameters.get("original_max_position_embeddings")
    return int((original or length) * rope.parameters["factor"])
