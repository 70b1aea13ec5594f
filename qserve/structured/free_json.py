"""Values without constraints: JSON without a schema, and what a schema leaves free.

Their numbers have a limited length, unlike llguidance's own.
"""

from collections.abc import Iterator
from typing import Any

from qserve.structured.lark_text import quoted
from qserve.structured.schema_facts import ANNOTATIONS, Unsupported, lookup
from qserve.structured.schema_values import FRACTION as STEP
from qserve.structured.schema_values import bound_numbers_

# Keywords that say nothing here, because their values allow every member of an object or array.
OPEN = {
    "properties": ({},),
    "required": ([],),
    "additionalProperties": (True, {}),
    "patternProperties": ({},),
    "items": (True, {}),
}
# Digits before the point, after it (a float64 needs 17) and in the exponent: at most 1e+117.
INTEGER, FRACTION, EXPONENT = 18, 17, 2

# A free value inside a schema, and the reference that replaces it.
NAME = "free_value_with_short_numbers"
REFERENCE = {"$ref": f"#/$defs/{NAME}"}
TYPES = ("null", "boolean", "number", "string", "array", "object")
LIMIT = 10**INTEGER - 1
FREE_VALUE = {
    "type": [*TYPES],
    "minimum": -LIMIT,
    "maximum": LIMIT,
    "multipleOf": STEP,
    "items": REFERENCE,
    "additionalProperties": REFERENCE,
}
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
# Keywords that llguidance intersects with the schema's other keywords.
INTERSECTED = {"$ref", "enum", "const", *ALTERNATIVES}


def start_of(schema: dict[str, Any] | bool) -> str | None:
    """Return the rule of `lark` for a schema without constraints; None for other schemas."""
    if isinstance(schema, bool):
        return "value" if schema else None
    kind = schema.get("type")
    if kind not in (None, "object", "array"):
        return None
    stated = {name: value for name, value in schema.items() if name not in ANNOTATIONS | {"type"}}
    if any(value not in OPEN.get(name, ()) for name, value in stated.items()):
        return None
    return kind or "value"


def limit_free_values_(root: dict[str, Any]) -> None:
    """Limit the length of numbers in the values that a schema leaves free, at any depth.

    Schemas that llguidance intersects with others keep their free values: it cannot intersect
    recursive schemas.
    """
    alone: dict[int, dict] = {}  # id() -> schema, if llguidance does not intersect it
    intersected: set[int] = set()
    free: list[tuple[int, Any, Any]] = []  # id() of a schema, and where it has a free value
    references: list[dict] = []  # schemas that are references to a free value
    pending: list[tuple[Any, bool]] = [(root, False)]
    while pending:
        schema, is_intersected = pending.pop()
        if not isinstance(schema, dict):
            continue
        # A reference to $defs of the root would have another meaning below an $id.
        is_intersected |= schema is not root and bool(schema.keys() & {"$id", "id"})
        number = id(schema)
        if number in (intersected if is_intersected else alone):
            continue
        if is_intersected:
            intersected.add(number)
        else:
            alone[number] = schema
        for holder, key, is_combined in _parts(schema):
            pending.append((holder[key], is_intersected or is_combined))
            if not is_intersected and not is_combined and _is_free(holder[key]):
                free.append((number, holder, key))
        if "$ref" in schema:
            is_combined = is_intersected or bool(schema.keys() - ANNOTATIONS - {"$ref"})
            try:
                target = lookup(schema["$ref"], root)
            except Unsupported:  # llguidance will report the error
                continue
            pending.append((target, is_combined))
            if not is_combined and _is_free(target):
                references.append(schema)
    for number, holder, key in free:
        if number not in intersected:
            holder[key] = REFERENCE
    for schema in references:
        if id(schema) not in intersected:
            schema |= REFERENCE
    for number, schema in alone.items():
        if number not in intersected and not schema.keys() & INTERSECTED and not _is_free(schema):
            _state_all_(schema)
    if isinstance(root.setdefault("$defs", {}), dict):
        root["$defs"][NAME] = FREE_VALUE


def _is_free(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Any, Any, bool]]:
    """Yield a container and a key for each schema in a schema; True if it is intersected."""
    stated = schema.keys() - ANNOTATIONS
    has_others = bool(stated & INTERSECTED)
    for keyword in ("properties", "patternProperties"):
        named = schema.get(keyword)
        for name in named if isinstance(named, dict) else ():
            yield named, name, has_others
    for keyword in ("items", "prefixItems", "additionalItems", "additionalProperties"):
        value = schema.get(keyword)
        if isinstance(value, list):
            yield from ((value, index, has_others) for index in range(len(value)))
        elif keyword in schema:
            yield schema, keyword, has_others
    for keyword in ALTERNATIVES:
        branches = schema.get(keyword)
        branches = branches if isinstance(branches, list) else []
        is_combined = stated != {keyword} or (keyword == "allOf" and len(branches) > 1)
        yield from ((branches, index, is_combined) for index in range(len(branches)))


def _state_all_(schema: dict[str, Any]) -> None:
    """State what a schema allows because it does not mention it: types, items and properties."""
    if "type" not in schema:
        schema["type"] = [*TYPES]
        bound_numbers_(schema)
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "object" in types:
        schema.setdefault("additionalProperties", REFERENCE)
    if "array" in types:
        has_list = isinstance(schema.get("items"), list)
        schema.setdefault("additionalItems" if has_list else "items", REFERENCE)


def lark(start: str, whitespace: str | None) -> str:
    """Return Lark of an "object", an "array" or any "value". `whitespace` None: without any.

    `whitespace` is a pattern in Lark's notation.
    """
    exponent = f"([eE][+-]?[0-9]{{1,{EXPONENT}}})?"
    number = rf"-?(0|[1-9][0-9]{{0,{INTEGER - 1}}})(\.[0-9]{{1,{FRACTION}}})?{exponent}"
    control = r"\\([\"\\bfnrt]|u00(0[0-9a-fA-F]|1[0-9a-fA-F]|7[fF]))"
    rules = {
        "start": start,
        "value": "object | array | STRING | NUMBER | "
        + " | ".join(map(quoted, ("true", "false", "null"))),
        "object": '"{" ws (pair ("," ws pair)*)? "}"',
        "pair": 'STRING ws ":" ws value ws',
        "array": '"[" ws (item ("," ws item)*)? "]"',
        "item": "value ws",
        "ws": '""' if whitespace is None else "WHITESPACE?",
        "STRING": rf'/"([^"\\\x00-\x1F\x7F]|{control})*"/',
        "NUMBER": f"/{number}/",
    }
    if whitespace is not None:
        rules["WHITESPACE"] = f"/{whitespace}/"
    return "\n".join(f"{name}: {body}" for name, body in rules.items())
