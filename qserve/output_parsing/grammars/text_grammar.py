"""Lark expressions of strings without JSON's quotes, as in tagged and braced calls."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from qserve.structured.backend import library
from qserve.structured.pattern_algebra import UnsupportedPattern
from qserve.structured.pattern_rewrite import has_look_around, rewrite
from qserve.structured.string_formats import PATTERNS, UNCHECKED

ANY = "/(?s:.*)/"
MAX_LENGTH = 2000  # largest minLength or maxLength: llguidance needs one state per character
# Keywords that do not affect validity.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
    + ("$comment", "$schema", "$id", "$defs", "definitions", "contentMediaType", "contentEncoding")
)
KEYWORDS = {"type", "pattern", "format", "minLength", "maxLength"}
PLAIN_ANCHORED = re.compile(r"\^((?:[^|\\^$]|\\.)*)\$")
MORE_FORMATS = {
    "uuid": (r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",),
    "ipv4": (r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}"
             r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])$",),
    "hostname": (r"^[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
                 r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?){0,5}$",),
}  # fmt: skip


class Inexpressible(ValueError):
    """A grammar cannot express a schema in a format: exactly the schema's values."""


def text_expressions(schema: Mapping[str, Any]) -> list[str]:
    """Return regular expressions; a string fits the schema if it matches all of them.

    Raises Inexpressible for keywords that are not about strings.
    """
    unknown = schema.keys() - KEYWORDS - ANNOTATIONS
    if unknown:
        raise Inexpressible(f"{min(unknown)} of a text")
    found = []
    patterns = [anchored(schema["pattern"])] if isinstance(schema.get("pattern"), str) else []
    for pattern in (*patterns, *_format_patterns(schema)):
        found.append(f"/{library().regex_to_lark(pattern, '')}/")
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if high == 0:
        raise Inexpressible("a text without characters")
    if low or high is not None:
        if max(low, high or 0) > MAX_LENGTH:
            raise Inexpressible("a length limit above 2000 of a text")
        found.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
    return found


def may_be_empty(schema: Mapping[str, Any]) -> bool:
    """Return True if the empty string certainly fits a schema."""
    return not schema.keys() & {"pattern", "format", "minLength"}


def anchored(pattern: str) -> str:
    """Convert a `pattern` of a JSON schema, which may match anywhere, to match whole texts."""
    plain = PLAIN_ANCHORED.fullmatch(pattern)
    if plain and not has_look_around(pattern):
        return plain[1]
    try:
        return rewrite((pattern,)).removeprefix("^(?:").removesuffix(")$")
    except UnsupportedPattern as error:
        raise Inexpressible(f"pattern: {error}") from None


def _format_patterns(schema: Mapping[str, Any]) -> Iterable[str]:
    """Yield expressions that match whole texts, for a schema's `format`."""
    name = schema.get("format")
    if name is None or name in UNCHECKED:
        return
    patterns = (PATTERNS | MORE_FORMATS).get(name)
    if patterns is None:
        raise Inexpressible(f"format {name} of a text")
    for pattern in patterns:
        yield pattern.removeprefix("^").removesuffix("$")


def without(texts: Iterable[str], expressions: Iterable[str] = ()) -> list[str]:
    """Return an expression (in a list) of texts without any of `texts` and `expressions`."""
    found = "|".join((*map(escaped, texts), *expressions))
    return [f"~/(?s:.*)({found})(?s:.*)/"] if found else []


def all_of(expressions: Iterable[str]) -> str:
    """Join expressions of a terminal by "and".

    ANY is always included: a complement alone would also match bytes that are not text.
    """
    return " & ".join((ANY, *expressions))


def escaped(text: str) -> str:
    """Return the regular expression that matches exactly a text."""
    return library().regex_to_lark("".join(map(_escape, text)), "")


def _escape(char: str) -> str:
    return "\\" + char if char in r"\.+*?()|[]{}^$#&-~/" else char


def as_text(value: Any) -> str:
    """Convert a constant of a schema to bare text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
