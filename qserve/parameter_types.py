"""What type a parameter of a request has, and the one way to say what is wrong with it.

The server's bodies and SamplingParams say it alike. Knows no parameter by name.
"""

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

from qserve.errors import ParameterError

MAX_SHOWN = 60  # characters of a wrong value
AN_INTEGER, A_NUMBER, A_FLAG, A_TEXT = "an integer", "a number", "true or false", "a text"
A_LIST, AN_OBJECT = "a list", "an object"

Check = Callable[[str, Any], Any]  # (the parameter's name, its value) -> the value as it is kept


def wrong_type(expected: str, value: object) -> str:
    """The problem with a value of another type."""
    return f"expected {expected}, found {shown(value)}"


def shown(value: object) -> str:
    """A value as an error tells it: short, whatever its size."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN])
    if isinstance(value, int | float):
        return f"{value!r:.{MAX_SHOWN}}"
    if isinstance(value, Mapping):
        return AN_OBJECT
    return A_LIST if isinstance(value, Collection) else type(value).__name__


def _is_list(value: object) -> bool:
    """Anything with items counts: ranges, sets and arrays, too."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def integer(name: str, value: Any) -> int:
    """An int, also of 580.0, which is an integer to JSON."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(name, wrong_type(AN_INTEGER, value))
    return int(value)


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(name, wrong_type(A_NUMBER, value))
    try:
        return float(value)
    except OverflowError:  # of an integer
        return math.inf if value > 0 else -math.inf


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(name, wrong_type(A_FLAG, value))
    return value


def text(name: str, value: Any, limit: int) -> str:
    """`limit`: most characters."""
    if not isinstance(value, str):
        raise ParameterError(name, wrong_type(A_TEXT, value))
    if len(value) > limit:
        raise ParameterError(name, f"expected at most {limit} characters, found {len(value)}")
    return value


def integers(limit: int) -> Check:
    """A list of at most so many ids, as a tuple."""

    def check(name: str, value: Any) -> tuple[int, ...]:
        items = _items(name, value, limit, "ids")
        if all(type(each) is int for each in items):  # thousands, checked for each output
            return tuple(items)
        return tuple(integer(f"{name}.{index}", each) for index, each in enumerate(items))

    return check


def texts(limit: int, what: str, length: int) -> Check:
    """A text, or a list of at most so many of at most so many characters, as a tuple."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        items = _items(name, [value] if isinstance(value, str) else value, limit, what)
        return tuple(text(f"{name}.{index}", each, length) for index, each in enumerate(items))

    return check


def biases(limit: int) -> Check:
    """Numbers by token id, which may be written as texts; as pairs, or pairs already."""

    def check(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if _is_list(value):
            value = dict(value)
        if not isinstance(value, Mapping):
            raise ParameterError(name, wrong_type(AN_OBJECT, value))
        if len(value) > limit:
            raise ParameterError(name, f"expected at most {limit} tokens, found {len(value)}")
        return tuple(
            (_token(name, key), number(f"{name}.{shown(key)}", each)) for key, each in value.items()
        )

    return check


def _token(name: str, key: Any) -> int:
    if isinstance(key, str) and key.lstrip("-").isdecimal() and len(key) < 20:
        return int(key)
    if isinstance(key, bool) or not isinstance(key, Integral):
        raise ParameterError(name, f"expected token ids as keys, found {shown(key)}")
    return int(key)


def _items(name: str, value: Any, limit: int, what: str) -> Any:
    if not _is_list(value):
        raise ParameterError(name, wrong_type(A_LIST, value))
    if len(value) > limit:
        raise ParameterError(name, f"expected at most {limit} {what}, found {len(value)}")
    return value
