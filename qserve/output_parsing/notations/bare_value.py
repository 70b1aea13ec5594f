"""Converts values that a model writes as bare text to JSON, with the type from the schema."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from qserve.output_parsing.notations.argument_schema import ArgumentSchema
from qserve.output_parsing.notations.json_reading import NUMBER
from qserve.output_parsing.notations.pythonic import literal_as_json

MAX_DIGITS = 4000  # Python refuses to parse longer integers
INTEGER = re.compile(r"[+-]?[0-9]+")
HALVES = re.compile("[\ud800-\udfff]")


def typed(text: str, schema: ArgumentSchema, key: str) -> str:
    """Convert the bare text of the argument `key` to JSON.

    The types null, boolean, integer, number, object, array are tried in this order. The first type
    counts that the schema allows and the text can be read as. Otherwise the text is a string.
    """
    schemas = schema.of(key)
    kinds = schema.kinds(schemas)
    for kind, read in READERS.items():
        if kind not in kinds or (kind == "integer" and "number" in kinds):
            continue
        try:
            found = read(text.strip())
            if schema.allows(schemas, json.loads(found)):
                return found
        except (ValueError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)


def from_json(text: str, schema: ArgumentSchema, key: str) -> str:
    """Convert the text of an argument that should be JSON; if it is not, convert it by `typed`."""
    try:
        value = json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return typed(text, schema, key)
    return text.strip() if NUMBER.fullmatch(text.strip()) else _dump(value)


def _null(text: str) -> str:
    if text.lower() not in ("null", "none"):
        raise ValueError(text)
    return "null"


def _boolean(text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower()


def _integer(text: str) -> str:
    """Convert an integer. As in JSON Schema, a number whose fraction is zero is an integer."""
    if INTEGER.fullmatch(text):
        return json.dumps(int(text))
    number = json.loads(_number(text))
    if not float(number).is_integer():
        raise ValueError(text)
    return json.dumps(int(number))


def _number(text: str) -> str:
    if not text.isascii() or "_" in text or len(text) > MAX_DIGITS:
        raise ValueError(text)
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    if NUMBER.fullmatch(text):
        return text  # keeps all digits
    return json.dumps(int(text) if INTEGER.fullmatch(text) else number)


def _composed(kind: type) -> Callable[[str], str]:
    """Return a reader of JSON, or of Python literals: True, None, single quotes, tuples."""

    def read(text: str) -> str:
        try:
            value = json.loads(text, strict=False, parse_constant=_no_constant)
        except ValueError:
            value = json.loads(literal_as_json(text))
        if not isinstance(value, kind):
            raise ValueError(text)
        return _dump(value)

    return read


def _dump(value: Any) -> str:
    """Encode a value as JSON. Lone surrogates stay escaped, since UTF-8 cannot encode them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value, allow_nan=False) if HALVES.search(text) else text


def _no_constant(name: str) -> Any:
    raise ValueError(name)


READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _composed(dict),
    "array": _composed(list),
}
