"""Type checks of request parameters, and the error messages for wrong types.

The server's request bodies and SamplingParams use the same checks.
"""

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

from qserve.errors import ParameterError

MAX_SHOWN = 60  # characters of a wrong value that an error message shows
AN_INTEGER, A_NUMBER, A_FLAG, A_TEXT = "an integer", "a number", "true or false", "a text"
A_LIST, AN_OBJECT = "a list", "an object"
TYPE_REMEDIES = {
    AN_INTEGER: "give a number without quotes",
    A_NUMBER: "give a number without quotes",
    A_FLAG: "give true or false without quotes",
    A_TEXT: "give a string",
    A_LIST: "put the values in [...]",
    AN_OBJECT: "put names and values in {...}",
}

Check = Callable[[str, Any], Any]  # (parameter name, value) -> the value to store


def type_error(name: str, expected: str, value: object) -> ParameterError:
    """Return the error for a value of the wrong type. `expected`: a key of TYPE_REMEDIES."""
    return ParameterError(
        name, f"expected {expected}, found {shown(value)}", TYPE_REMEDIES[expected]
    )


def shown(value: object) -> str:
    """Return a value as an error message shows it, truncated."""
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


def listed(value: object) -> str:
    """Return a checked value as an error message shows it: tuples as lists, or as an object."""
    if isinstance(value, tuple):
        is_pairs = all(
            isinstance(each, tuple) and each and isinstance(each[-1], float) for each in value
        )
        value = dict(value) if value and is_pairs else [*value]
    found = repr(value)
    return found if len(found) <= MAX_SHOWN else f"{found[:MAX_SHOWN]}..."


def _is_list(value: object) -> bool:
    """Return True for lists and other collections: ranges, sets, arrays. Texts are no lists."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def integer(name: str, value: Any) -> int:
    """Check an integer. A float such as 580.0 passes: in JSON it is an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise type_error(name, AN_INTEGER, value)
    return int(value)


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise type_error(name, A_NUMBER, value)
    try:
        return float(value)
    except OverflowError:  # a huge integer
        return math.inf if value > 0 else -math.inf


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise type_error(name, A_FLAG, value)
    return value


def text(name: str, value: Any, limit: int) -> str:
    """Check a text of at most `limit` characters."""
    if not isinstance(value, str):
        raise type_error(name, A_TEXT, value)
    if len(value) > limit:
        raise ParameterError(
            name, f"expected at most {limit} characters, found {len(value)}", "shorten it"
        )
    return value


def integers(limit: int) -> Check:
    """Return a check for a list of at most `limit` ids. The check returns a tuple."""

    def check(name: str, value: Any) -> tuple[int, ...]:
        items = _items(name, value, limit, "ids")
        if all(type(each) is int for each in items):  # fast path: lists have thousands of ids
            return tuple(items)
        return tuple(integer(f"{name}.{index}", each) for index, each in enumerate(items))

    return check


def texts(limit: int, what: str, length: int, total: int | None = None) -> Check:
    """Return a check for a text or a list of at most `limit` texts. The check returns a tuple.

    A text may have up to `length` characters, all texts together up to `total`. Error messages call
    the texts `what`.
    """

    def check(name: str, value: Any) -> tuple[str, ...]:
        items = _items(name, [value] if isinstance(value, str) else value, limit, what)
        found = tuple(text(f"{name}.{index}", each, length) for index, each in enumerate(items))
        if total is not None and (count := sum(map(len, found))) > total:
            raise ParameterError(
                name,
                f"expected at most {total} characters in all, found {count}",
                "give fewer or shorter texts",
            )
        return found

    return check


def biases(limit: int) -> Check:
    """Return a check for numbers by token id, in a mapping or a list of pairs. Ids may be strings.

    The check returns a tuple of (token id, number) pairs.
    """

    def check(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if _is_list(value):
            try:
                value = dict(value)
            except (TypeError, ValueError):
                problem = "expected an object, or a list of pairs of a token id and a number"
                raise ParameterError(name, problem, 'for example {"1234": -100}') from None
        if not isinstance(value, Mapping):
            raise type_error(name, AN_OBJECT, value)
        if len(value) > limit:
            raise ParameterError(
                name, f"expected at most {limit} tokens, found {len(value)}", "give fewer tokens"
            )
        return tuple(
            (_token(name, key), number(f"{name}.{shown(key)}", each)) for key, each in value.items()
        )

    return check


def _token(name: str, key: Any) -> int:
    if isinstance(key, str) and key.lstrip("-").isdecimal() and len(key) < 20:
        return int(key)
    if isinstance(key, bool) or not isinstance(key, Integral):
        raise ParameterError(
            name,
            f"expected token ids as keys, found {shown(key)}",
            "write the ids as decimal numbers",
        )
    return int(key)


def _items(name: str, value: Any, limit: int, what: str) -> Any:
    if not _is_list(value):
        raise type_error(name, A_LIST, value)
    if len(value) > limit:
        raise ParameterError(
            name, f"expected at most {limit} {what}, found {len(value)}", "give fewer"
        )
    return value
