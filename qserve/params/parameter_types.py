"""Types of request parameters, and the messages for wrong ones.

The server's request bodies and SamplingParams share them.
"""

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

from qserve.errors import ParameterError

MAX_SHOWN = 60  # length to which a wrong value is shown
AN_INTEGER, A_NUMBER, A_FLAG, A_TEXT = "an integer", "a number", "true or false", "a text"
A_LIST, AN_OBJECT = "a list", "an object"

Check = Callable[[str, Any], Any]  # (parameter name, value) -> the value to store


def wrong_type(expected: str, value: object) -> str:
    """Message for a value of another type."""
    return f"expected {expected}, found {shown(value)}"


def shown(value: object) -> str:
    """A value for an error message, truncated."""
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
    """True for any value with items, such as ranges, sets and arrays."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def integer(name: str, value: Any) -> int:
    """Check an int, or a float such as 580.0, which is an integer in JSON."""
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
    except OverflowError:  # a huge integer
        return math.inf if value > 0 else -math.inf


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(name, wrong_type(A_FLAG, value))
    return value


def text(name: str, value: Any, limit: int) -> str:
    """Check a text. `limit`: maximum number of characters."""
    if not isinstance(value, str):
        raise ParameterError(name, wrong_type(A_TEXT, value))
    if len(value) > limit:
        raise ParameterError(name, f"expected at most {limit} characters, found {len(value)}")
    return value


def integers(limit: int) -> Check:
    """Check for a list of at most `limit` ids; returns a tuple."""

    def check(name: str, value: Any) -> tuple[int, ...]:
        items = _items(name, value, limit, "ids")
        if all(type(each) is int for each in items):  # thousands, checked for each output
            return tuple(items)
        return tuple(integer(f"{name}.{index}", each) for index, each in enumerate(items))

    return check


def texts(limit: int, what: str, length: int, total: int | None = None) -> Check:
    """Check for a text or a list of at most `limit` texts; returns a tuple.

    Each has at most `length` characters, all together at most `total`.
    """

    def check(name: str, value: Any) -> tuple[str, ...]:
        items = _items(name, [value] if isinstance(value, str) else value, limit, what)
        found = tuple(text(f"{name}.{index}", each, length) for index, each in enumerate(items))
        if total is not None and (count := sum(map(len, found))) > total:
            raise ParameterError(name, f"expected at most {total} characters in all, found {count}")
        return found

    return check


def biases(limit: int) -> Check:
    """Check for numbers by token id, as a mapping or pairs; ids may be strings."""

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
