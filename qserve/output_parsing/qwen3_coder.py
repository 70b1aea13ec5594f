"""Calls as Qwen3-Coder writes them: tags, with values as bare text that the schema gives a type."""

import json
from collections.abc import Mapping
from typing import Any

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.reading import BrokenCall, Emit, Reader, after_space, expect, skip, until

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER = "<parameter="
# The first of them that stands there ends a value.
PARAMETER_ENDS = ("\n</parameter>", "</parameter>")


def qwen3_coder(calls: Calls, marker: str) -> Reader[str]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"""
    if marker == CALL:
        if (yield from after_space()) != FUNCTION[0]:
            raise BrokenCall
        yield from expect(FUNCTION[1:])
    name, _ = yield from until(">")
    if not name:
        raise BrokenCall
    properties = calls.tools.get(name, {}).get("properties")
    calls.name(name)
    keys: set[str] = set()
    while True:
        tag = yield from _tag()
        if tag == FUNCTION_END:
            break
        key, _ = yield from until(">")
        if not key or key in keys:
            raise BrokenCall
        calls.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _value(_types(schema), calls)
    calls.arguments("}" if keys else "{}")
    calls.end()
    return (yield from skip(CALL_END))


def _tag() -> Reader[str]:
    """PARAMETER or FUNCTION_END, which differ in the second character."""
    if (yield from after_space()) != "<":
        raise BrokenCall
    second = yield
    for tag in (PARAMETER, FUNCTION_END):
        if second == tag[1]:
            yield from expect(tag[2:])
            return tag
    raise BrokenCall


def _value(types: frozenset[str], calls: Calls) -> Reader[None]:
    """A value and its end tag. Texts are told as they come, others when they are complete."""
    if types == {"string"}:
        calls.arguments('"')
        yield from _bare(lambda text: calls.arguments(_escaped(text)))
        calls.arguments('"')
        return
    parts: list[str] = []
    yield from _bare(parts.append)
    calls.arguments(typed("".join(parts), types))


def _bare(emit: Emit) -> Reader[None]:
    """Text up to the end tag, less one line break at each side."""
    held = yield
    if held == "\n":
        held = yield
    while True:
        if not held:
            raise BrokenCall
        while held and not any(end.startswith(held) for end in PARAMETER_ENDS):
            emit(held[0])
            held = held[1:]
        if held in PARAMETER_ENDS:
            return
        char = yield
        if not char:
            emit(held)
            raise BrokenCall
        held += char


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: Any) -> frozenset[str]:
    """The JSON types that a schema states; of what states none, text."""
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    found = schema.get("type")
    types = set(found if isinstance(found, list) else [found] if isinstance(found, str) else [])
    for branches in ("anyOf", "oneOf"):
        if isinstance(schema.get(branches), list):
            types |= {kind for branch in schema[branches] for kind in _types(branch)}
    return frozenset(types or {"string"})


def typed(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON: of the first type that it can be, else a string."""
    for kind, read in READERS.items():
        if kind in types:
            try:
                return read(text.strip())
            except (ValueError, RecursionError):
                continue
    return json.dumps(text, ensure_ascii=False)


def _null(text: str) -> str:
    if text.lower() not in ("null", "none"):
        raise ValueError(text)
    return "null"


def _boolean(text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower()


def _number(text: str) -> str:
    try:
        return json.dumps(int(text))
    except ValueError:
        return json.dumps(float(text), allow_nan=False)


def _json(kind: type) -> Any:
    def read(text: str) -> str:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    return read


READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": lambda text: json.dumps(int(text)),
    "number": _number,
    "object": _json(dict),
    "array": _json(list),
}
