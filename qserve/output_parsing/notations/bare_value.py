"""Convert values that a model writes as bare text to JSON of the type in the schema."""

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
    """JSON of a bare value of the argument `key`.

    The order of types is null, boolean, integer, number, object, array. The first one counts that
    the schema allows and the text can be. Any other text is a string.
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
    """JSON of a value that a format says is JSON; another text is typed by the schema."""
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
    """Also accept a number whose fraction is zero, as JSON Schema does."""
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
    """Parse JSON, or Python's notation: True, None, single quotes, tuples."""

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
    """JSON of a value; halves of a character stay escapes, since UTF-8 cannot have them."""
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
