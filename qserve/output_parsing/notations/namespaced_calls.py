"""Reader of MiniMax-M3's calls, whose tags have the names of arguments, each after a token.

]<]minimax[>[<invoke name="NAME">]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>]<]minimax[>[</invoke>

Tags inside of a value are the properties of an object, or `item` for each element of an array. The
tool's schema determines the types of other values. No value contains the token.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.notations.argument_schema import ArgumentSchema
from qserve.output_parsing.notations.bare_value import typed
from qserve.output_parsing.notations.json_reading import NUMBER, WORDS
from qserve.output_parsing.notations.source import MAX_NAME_CHARS
from qserve.output_parsing.reading import (
    BrokenCall,
    Emit,
    Reader,
    after_space,
    expect,
    json_escaped,
    until,
)
from qserve.output_parsing.tool_format import Start

SPACE_NAME = "]<]minimax[>["  # the token before each tag
ITEM = "item"  # tag of an array's elements
KEY = re.compile(r"[A-Za-z_][\w.-]*")
MAX_DEPTH = 50  # maximum number of nested tags
DEFINITIONS = ("$defs", "definitions")


def namespaced(calls: Calls, start: Start) -> Reader[str]:
    """Read one call, starting with the quote before the tool's name."""
    if start.char != '"':
        raise BrokenCall
    name, _ = yield from until('"')
    yield from expect(">")
    calls.check(name)
    root = calls.tools.get(name)
    schema = ArgumentSchema(root)
    calls.name(name)
    keys: set[str] = set()
    while (key := (yield from _next_tag())) != "/invoke":
        if key in keys or not KEY.fullmatch(key):
            raise BrokenCall
        calls.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        schemas = schema.of(key)
        if schema.kinds(schemas) == {"string"}:
            calls.arguments('"')
            tag = yield from _text(lambda text: calls.arguments(json_escaped(text)))
            if tag != f"/{key}":
                raise BrokenCall
            calls.arguments('"')
        else:
            calls.arguments((yield from _value(key, Place(root, schemas), 1)))
    calls.arguments("}" if keys else "{}")
    calls.end()
    return ""


class Place:
    """Schemas of one value, of which any may apply."""

    def __init__(self, root: Any, schemas: list[Any]) -> None:
        self._root = root if isinstance(root, Mapping) else {}
        self.schemas = schemas
        stated = {"properties": {"value": {"anyOf": schemas}}} if schemas else {}
        self._value = ArgumentSchema({**self._definitions, **stated})

    @property
    def _definitions(self) -> dict[str, Any]:
        return {name: self._root[name] for name in DEFINITIONS if name in self._root}

    @property
    def kinds(self) -> frozenset[str]:
        return self._value.kinds(self._value.of("value"))

    def of(self, key: str) -> "Place":
        """Return the place of a property, or of an array's elements."""
        found: list[Any] = []
        for schema in self.schemas:
            if isinstance(schema, Mapping):
                found += ArgumentSchema({**schema, **self._definitions}).of(key)
                if key == ITEM and "items" in schema:
                    found.append(schema["items"])
        return Place(self._root, found)

    def as_json(self, text: str) -> str:
        """Return the JSON of a value without tags. Without a schema it may be a scalar."""
        word = text.strip()
        if not self.schemas:
            is_scalar = word in WORDS or NUMBER.fullmatch(word)
            return WORDS.get(word, word) if is_scalar else json.dumps(text, ensure_ascii=False)
        if not word and "string" not in self.kinds:
            empty = {"array": "[]", "object": "{}"}
            found = [each for kind, each in empty.items() if kind in self.kinds]
            if found:
                return found[0]
        return typed(text, self._value, "value")


def _value(key: str, place: Place, depth: int) -> Reader[str]:
    """Read a value and its end tag. Returns its JSON."""
    if depth > MAX_DEPTH:
        raise BrokenCall
    parts: list[str] = []
    tag = yield from _text(parts.append)
    if tag == f"/{key}":
        return place.as_json("".join(parts))
    if "".join(parts).strip():
        raise BrokenCall
    found: list[tuple[str, str]] = []
    while tag != f"/{key}":
        if not KEY.fullmatch(tag):
            raise BrokenCall
        found.append((tag, (yield from _value(tag, place.of(tag), depth + 1))))
        tag = yield from _next_tag()
    names = [name for name, _ in found]
    if set(names) == {ITEM} and ("array" in place.kinds or "object" not in place.kinds):
        return f"[{', '.join(value for _, value in found)}]"
    if len(set(names)) < len(names):
        raise BrokenCall
    inside = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in found)
    return f"{{{', '.join(inside)}}}"


def _next_tag() -> Reader[str]:
    """Read white space and a tag with its token. Returns what is between its brackets."""
    char = yield from after_space()
    if char != SPACE_NAME[0]:
        raise BrokenCall
    yield from expect(SPACE_NAME[1:])
    return (yield from _tag())


def _tag() -> Reader[str]:
    yield from expect("<")
    name = ""
    while (char := (yield)) != ">":
        if not char or char in "<\n" or len(name) > MAX_NAME_CHARS:
            raise BrokenCall
        name += char
    return name


def _text(emit: Emit) -> Reader[str]:
    """Read a text and the tag after it. Returns what is between the tag's brackets."""
    held = ""  # characters that may start the token
    while True:
        char = yield
        if not char:
            raise BrokenCall
        held += char
        while not SPACE_NAME.startswith(held):
            emit(held[0])
            held = held[1:]
        if held == SPACE_NAME:
            return (yield from _tag())
