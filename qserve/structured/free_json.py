"""Grammar of JSON without a schema. Its numbers have a limited length, unlike llguidance's own."""

from typing import Any

from qserve.structured.lark_text import quoted
from qserve.structured.schema_facts import ANNOTATIONS

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
