"""Skip connections between layers: Solar mixes the hidden states before earlier layers in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import config_error

# keys of config.json: layers whose input is kept, and later layers that mix it in
_KEYS = (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4"))
_FACTOR_KEY = "bskcn_tv"  # factors in training and in inference


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipConnection:
    """A layer of `kept` keeps its input; a layer of `mixed` reads the last one kept before it.

    Its input becomes factor * kept + (1 - factor) * input. A layer in both keeps first.
    """

    kept: frozenset[int]
    mixed: frozenset[int]
    factor: float


def skip_connections(config: Mapping[str, Any]) -> tuple[SkipConnection, ...]:
    """Return the skip connections that config.json states. Raises CheckpointError."""
    factors = config.get(_FACTOR_KEY)
    if not (isinstance(factors, list) and len(factors) == 2 and _is_number(factors[1])):
        raise config_error(_FACTOR_KEY, "two numbers", factors)
    found = []
    for keys in _KEYS:
        layers = [config.get(key) for key in keys]
        for key, numbers in zip(keys, layers, strict=True):
            is_list = isinstance(numbers, list)
            if not (is_list and all(type(each) is int and each >= 0 for each in numbers)):
                raise config_error(key, "numbers of layers", numbers)
        kept, mixed = map(frozenset, layers)
        if mixed and (not kept or min(mixed) < min(kept)):
            raise config_error(keys[1], f"layers from {keys[0]} on", layers[1])
        found.append(SkipConnection(kept=kept, mixed=mixed, factor=float(factors[1])))
    return tuple(found)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
