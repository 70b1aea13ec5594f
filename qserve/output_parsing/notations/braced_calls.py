"""Gemma's calls: call:f{a:<|"|>text<|"|>,n:42,ok:true,o:{k:null},l:[1,2]}

Keys have no quotes. Strings have the token <|"|> on both sides, and no escapes. JSON is accepted,
too.
"""

import json
from dataclasses import dataclass

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.notations.argument_schema import ArgumentSchema
from qserve.output_parsing.notations.bare_value import typed
from qserve.output_parsing.notations.json_reading import NUMBER, WORDS, json_string
from qserve.output_parsing.reading import BrokenCall, Emit, Reader, after_space, json_escaped
from qserve.output_parsing.tool_format import Start

MAX_KEY_CHARS = 256
MAX_DEPTH = 100  # maximum number of nested brackets
ENDS = ",]}"  # characters that end a bare value


@dataclass(frozen=True, slots=True, kw_only=True)
class Braced:
    quote: str  # text before and after a string

    def read(self, calls: Calls, start: Start) -> Reader[str]:
        """Read the arguments of one call. Its name has been read."""
        if start.char != "{":
            raise BrokenCall
        schema = ArgumentSchema(calls.tools.get(start.name))
        calls.name(start.name)
        calls.arguments("{")
        keys: set[str] = set()
        char = yield from after_space()
        while char != "}":
            key, char = yield from self._key(char)
            if key in keys:
                raise BrokenCall
            comma = ", " if keys else ""
            keys.add(key)
            calls.arguments(f"{comma}{_dump(key)}: ")
            char = yield from self._argument(key, char, schema, calls.arguments)
            if char == ",":
                char = yield from after_space()
            elif char != "}":
                raise BrokenCall
        calls.arguments("}")
        calls.end()
        return ""

    def _argument(self, key: str, char: str, schema: ArgumentSchema, emit: Emit) -> Reader[str]:
        """Read the value of an argument. If its type is ambiguous, the schema decides."""
        kinds = schema.kinds(schema.of(key))
        if "string" in kinds or char in "{[":
            is_text = kinds == {"string"} and bool(schema.of(key))
            return (yield from self._value(char, emit, is_text=is_text))
        parts: list[str] = []
        is_quoted = char in (self.quote[0], '"')
        char = yield from self._value(char, parts.append)
        value = "".join(parts)
        emit(typed(json.loads(value), schema, key) if is_quoted else value)
        return char

    def _value(
        self, char: str, emit: Emit, *, is_text: bool = False, depth: int = 0
    ) -> Reader[str]:
        """Read a value. Returns the first character after it that is not white space.

        `is_text`: read bare words and numbers as strings, too.
        """
        if depth > MAX_DEPTH:
            raise BrokenCall
        if char in ("{", "["):
            return (yield from self._composed(char, emit, depth + 1))
        if char in (self.quote[0], '"'):
            yield from self._text(char, emit)
            return (yield from after_space())
        text = ""
        while char and char not in ENDS:
            text += char
            if len(text) > MAX_KEY_CHARS:
                raise BrokenCall
            char = yield
        word = text.strip()
        if not char or not word or self.quote[0] in word:
            raise BrokenCall
        is_plain = not is_text and (word in WORDS or NUMBER.fullmatch(word))
        emit(WORDS.get(word, word) if is_plain else _dump(word))
        return char

    def _composed(self, char: str, emit: Emit, depth: int) -> Reader[str]:
        emit(char)
        is_object = char == "{"
        end = "}" if is_object else "]"
        char = yield from after_space()
        is_first = True
        while char != end:
            if not is_first:
                emit(", ")
            if is_object:
                key, char = yield from self._key(char)
                emit(f"{_dump(key)}: ")
            char = yield from self._value(char, emit, depth=depth)
            is_first = False
            if char == ",":
                char = yield from after_space()
            elif char != end:
                raise BrokenCall
        emit(end)
        return (yield from after_space())

    def _key(self, char: str) -> Reader[tuple[str, str]]:
        """Read a key and its colon. Returns the key, and the first character of its value."""
        key = ""
        if char in (self.quote[0], '"'):
            parts: list[str] = []
            yield from self._text(char, parts.append)
            key = json.loads("".join(parts))
            char = yield from after_space()
        while char and char not in ":{}[],\n":
            key += char
            if len(key) > MAX_KEY_CHARS:
                raise BrokenCall
            char = yield
        if char != ":" or not key.strip():
            raise BrokenCall
        return key.strip(), (yield from after_space())

    def _text(self, char: str, emit: Emit) -> Reader[None]:
        """Read a string; `char` is the first character of its opening quote."""
        if char == '"':
            return (yield from json_string(emit))
        for expected in self.quote[1:]:
            if (yield) != expected:
                raise BrokenCall
        emit('"')
        held = ""  # characters that may start the closing quote
        while True:
            char = yield
            if not char:
                raise BrokenCall
            if char == self.quote[len(held)]:
                held += char
                if held == self.quote:
                    emit('"')
                    return None
            else:
                if held:
                    emit(json_escaped(held))
                held = char if char == self.quote[0] else ""
                if not held:
                    emit(json_escaped(char))


def _dump(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
