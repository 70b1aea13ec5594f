"""Kinds of rotary embedding that transformers has: what each needs, which qserve computes."""

from typing import NamedTuple


class RopeType(NamedTuple):
    """What config.json must state of a kind."""

    numbers: tuple[str, ...] = ()  # each above 0
    lists: tuple[str, ...] = ()  # of such numbers
    served: bool = True  # by qserve/model/rope.py


ROPE_DEFAULT = "default"
ROPE_TYPES: dict[str, RopeType] = {
    ROPE_DEFAULT: RopeType(),
    "linear": RopeType(numbers=("factor",)),
    "dynamic": RopeType(numbers=("factor",)),
    "llama3": RopeType(numbers=("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": RopeType(numbers=("factor",)),
    "longrope": RopeType(lists=("short_factor", "long_factor")),
    "proportional": RopeType(served=False),
}
SERVED_ROPE_TYPES = tuple(name for name, row in ROPE_TYPES.items() if row.served)
