"""Types of rotary embedding in transformers, and the parameters that they require."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from formats.errors import COPY_CONFIG, InputError


class RopeType(NamedTuple):
    """Keys that config.json must state for a type."""

    numbers: tuple[str, ...] = ()  # numbers above 0
    lists: tuple[str, ...] = ()  # lists of numbers above 0


ROPE_DEFAULT = "default"
ROPE_TYPES: dict[str, RopeType] = {
    ROPE_DEFAULT: RopeType(),
    "linear": RopeType(numbers=("factor",)),
    "dynamic": RopeType(numbers=("factor",)),
    "llama3": RopeType(numbers=("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": RopeType(numbers=("factor",)),
    "longrope": RopeType(lists=("short_factor", "long_factor")),
    "proportional": RopeType(),
}
# prefixes of keys about axes
_OF_AXES = ("mrope_", "xdrope_")
# RoPE type with axes (M-RoPE) -> type without
_PLAIN = {"mrope": ROPE_DEFAULT, "xdrope": "dynamic"}


def one_axis(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters without the axes of images, which are equal for text."""
    kept = {key: value for key, value in rope.items() if not key.startswith(_OF_AXES)}
    for key in ("type", "rope_type"):
        if kept.get(key) in _PLAIN:
            kept[key] = _PLAIN[kept[key]]
    return kept


def axes_of_pairs(sections: Sequence[int], num_pairs: int, *, is_interleaved: bool) -> list[int]:
    """Return the axis of each rotated pair. Raises InputError if the sections do not fit."""
    if len(sections) != 3 or sum(sections) != num_pairs:
        raise InputError(
            "config.json mrope_section",
            f"expected three numbers that add up to {num_pairs}, found {list(sections)}",
            COPY_CONFIG,
        )
    if not is_interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], num_pairs), 3):
            axes[pair] = axis
    return axes


def axes_with_frames_last(sections: Sequence[int], num_pairs: int) -> list[int]:
    """Return the axis of each rotated pair: rows and columns alternate, then frames (ERNIE).

    `sections`: number of pairs of rows, of columns and of frames. Raises InputError if they do not
    fit.
    """
    if len(sections) != 3 or sum(sections) != num_pairs or sections[0] != sections[1]:
        raise InputError(
            "config.json mrope_section",
            f"expected three numbers of sum {num_pairs}, the first two equal, found"
            f" {list(sections)}",
            COPY_CONFIG,
        )
    return [1, 2] * sections[0] + [0] * sections[2]


def axes_of_halves(sections: Sequence[int], num_pairs: int) -> tuple[list[int], list[int]]:
    """Return the axis of each channel in the first and in the second half of a head (Hunyuan).

    Each section counts half of the channels of its axis, which follow each other. Raises InputError
    if the sections do not fit.
    """
    if len(sections) < 3 or sum(sections) != num_pairs:
        raise InputError(
            "config.json mrope_section",
            f"expected at least three numbers that add up to {num_pairs}, found {list(sections)}",
            COPY_CONFIG,
        )
    axes = [axis for axis, count in enumerate(sections) for _ in range(2 * count)]
    return axes[:num_pairs], axes[num_pairs:]
