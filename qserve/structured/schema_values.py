"""Rewrites patterns and formats of strings, and limits numbers, in one schema."""

import re
from collections.abc import Callable

from qserve.structured.pattern_algebra import UnsupportedPattern
from qserve.structured.pattern_rewrite import (
    has_look_around,
    is_within,
    literals,
    rewrite,
    without_look_around,
)
from qserve.structured.schema_facts import ANNOTATIONS, Schema, Unsupported, types_of
from qserve.structured.string_formats import (
    EMAIL,
    OTHERS_OF_LIBRARY,
    PATTERNS,
    PLAIN_EMAIL,
    UNCHECKED,
)

# Limits on the length of numbers: a weak model would repeat a digit up to its token limit.
MAX_INTEGER, MAX_NUMBER, FRACTION = 10**18 - 1, 10**15, 1e-9
MAX_BOUND = 9 * 10**18  # llguidance refuses ranges that end near 2**63 or beyond
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BACK_REFERENCE = re.compile(r"\\(?:[1-9]|k<)")


def rewrite_texts_(schema: dict, warn: Callable[[str, str], None]) -> None:
    """Replace the patterns and formats of one schema. `warn`: called with keyword and reason."""
    found = []
    if isinstance(pattern := schema.pop("pattern", None), str):
        try:
            if BACK_REFERENCE.search(pattern):
                raise UnsupportedPattern("a back reference")
            found += without_look_around(pattern)
        except UnsupportedPattern as error:
            warn("pattern", str(error))
    if isinstance(name := schema.get("format"), str) and name not in OTHERS_OF_LIBRARY:
        del schema["format"]
        found = _with_format(found, name)
        if name not in PATTERNS and name not in UNCHECKED and "string" in types_of(schema):
            warn("format", f"unknown: {name}")
    if found:
        schema["pattern"], *others = found
        if others:
            more = [{"pattern": each} for each in others]
            schema["allOf"] = [*schema.get("allOf", ()), *more]
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict) and any(map(has_look_around, by_pattern)):
        try:
            schema["patternProperties"] = {
                rewrite((name,)) if has_look_around(name) else name: each
                for name, each in by_pattern.items()
            }
        except UnsupportedPattern as error:
            del schema["patternProperties"]
            warn("patternProperties", str(error))


def bound_numbers_(schema: dict) -> None:
    """Limit the length of the numbers of one schema."""
    stated = schema.get("type")
    stated = {stated} if isinstance(stated, str) else {*(stated or ())}
    if not stated & {"integer", "number"} or "enum" in schema or "const" in schema:
        return
    limit = MAX_NUMBER if "number" in stated else MAX_INTEGER
    for keyword in (*LOWER, *UPPER):
        value = _first_number(schema, keyword)
        if value is not None and (value < -MAX_BOUND if keyword in LOWER else value > MAX_BOUND):
            schema[keyword] = MAX_BOUND if keyword in UPPER else -MAX_BOUND
    low, high = _first_number(schema, *LOWER), _first_number(schema, *UPPER)
    if high is None and (low is None or low < limit):
        schema["maximum"] = limit
    if low is None and (high is None or high > -limit):
        schema["minimum"] = -limit
    if "number" in stated:
        schema.setdefault("multipleOf", FRACTION)


def _with_format(patterns: list[str], name: str) -> list[str]:
    """Return the patterns of a string, with those of its format.

    The format email together with another pattern is too complex for llguidance, so only one of the
    two is used.
    """
    if not patterns or name != EMAIL:
        return [*patterns, *PATTERNS.get(name, ())]
    loose, exact = PLAIN_EMAIL
    is_narrower = all(is_within(loose, each) for each in patterns)
    return [*exact] if is_narrower else patterns


def _first_number(schema: dict, *keywords: str) -> float | None:
    for keyword in keywords:
        value = schema.get(keyword)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None


def patterns_of(names: Schema) -> list[str]:
    """Return patterns for `propertyNames`; a name fits if it matches all. Raises Unsupported."""
    if not isinstance(names, dict):
        raise Unsupported("not a form of names")
    found, least, most = [], names.get("minLength", 0), names.get("maxLength", "")
    if least or most != "":
        found.append(rf"^[\s\S]{{{least},{most}}}$")
    for keyword, value in names.items():
        if keyword == "pattern":
            found.append(value)
        elif keyword == "format" and value in PATTERNS:
            found += PATTERNS[value]
        elif keyword == "not":
            found.append(in_python(rewrite((), tuple(patterns_of(value)))))
        elif keyword == "allOf":
            found += [pattern for each in value for pattern in patterns_of(each)]
        elif keyword == "const" or (keyword == "enum" and isinstance(value, list)):
            found.append(literals([value] if keyword == "const" else value))
        elif keyword not in ("minLength", "maxLength", "type", *ANNOTATIONS):
            raise Unsupported(f"names by {keyword}")
    return found or [r"^[\s\S]*$"]


def in_python(pattern: str) -> str:
    """Convert an expression of `rewrite` to the syntax of Python's re."""
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
