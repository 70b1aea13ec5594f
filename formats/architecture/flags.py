"""Flags of a family's row: fixed, or read from config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Stated(NamedTuple):
    """Flag that is the value of a key of config.json."""

    key: str
    default: bool


class Equals(NamedTuple):
    """Flag that is set if a key of config.json has this value."""

    key: str
    value: Any


# a fixed value, a key of config.json (missing: False), or one of the above
Flag = bool | str | Stated | Equals


def is_set(flag: Flag, config: Mapping[str, Any]) -> bool:
    """Return a flag's value for a config.json."""
    if isinstance(flag, Stated):
        return bool(config.get(flag.key, flag.default))
    if isinstance(flag, Equals):
        return bool(config.get(flag.key) == flag.value)
    return bool(config.get(flag, False)) if isinstance(flag, str) else flag
