"""Types of rotary embedding in transformers, and their parameters."""

from typing import NamedTuple


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
