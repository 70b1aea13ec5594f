"""Streaming reader of JSON values. It follows RFC 8259, and corrects three mistakes of models.

It escapes line breaks and tabs in strings, converts Python's True, False and None, and drops a
comma before a closing bracket.
"""

import json
import re

from qserve.output_parsing.reading import BrokenCall, Emit, Reader, after_space

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPES = '"\\/bfnrt'
WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS |= {"True": "true", "False": "false", "None": "null"}
STARTS = {word[0]: word for word in WORDS}
HEX = "0123456789abcdefABCDEF"


def json_value(char: str, emit: Emit) -> Reader[str]:
    """Read the value that starts with `char`. Returns the character after the value."""
    closing: list[str] = []
    while True:
        if char in ("{", "["):
            emit(char)
            end = "}" if char == "{" else "]"
            char = yield from after_space(None, emit)
            if char != end:
                closing.append(end)
                if end == "}":
                    char = yield from _key(char, emit)
                continue
            emit(char)
            char = yield
        elif char == '"':
            yield from json_string(emit)
            char = yield
        elif char in STARTS:
            char = yield from _word(char, emit)
        else:
            char = yield from _number(char, emit)
        while closing:
            char = yield from after_space(char, emit)
            if char == closing[-1]:
                emit(closing.pop())
                char = yield
                continue
            if char != ",":
                raise BrokenCall
            comma = [char]
            char = yield from after_space(None, comma.append)
            if char == closing[-1]:
                continue
            emit("".join(comma))
            if closing[-1] == "}":
                char = yield from _key(char, emit)
            break
        else:
            return char


def json_string(emit: Emit) -> Reader[None]:
    """Read a string after its opening quote. An escape is emitted in one piece."""
    emit('"')
    while True:
        char = yield
        if char == '"':
            emit(char)
            return
        if char == "\\":
            char = yield from _escape()
        elif not char:
            raise BrokenCall
        elif char < " ":
            char = json.dumps(char)[1:-1]
        emit(char)


def json_text() -> Reader[str]:
    """Read a string after its opening quote. Returns the decoded text."""
    parts: list[str] = []
    yield from json_string(parts.append)
    return json.loads("".join(parts))


def _escape() -> Reader[str]:
    char = yield
    if char == "u":
        digits = ""
        for _ in range(4):
            digit = yield
            if not digit or digit not in HEX:
                raise BrokenCall
            digits += digit
        return f"\\u{digits}"
    if not char or char not in ESCAPES:
        raise BrokenCall
    return f"\\{char}"


def _key(char: str, emit: Emit) -> Reader[str]:
    """Read a key and its colon. Returns the first character of the value."""
    if char != '"':
        raise BrokenCall
    yield from json_string(emit)
    if (yield from after_space(None, emit)) != ":":
        raise BrokenCall
    emit(":")
    return (yield from after_space(None, emit))


def _word(char: str, emit: Emit) -> Reader[str]:
    word = STARTS[char]
    for expected in word[1:]:
        if (yield) != expected:
            raise BrokenCall
    emit(WORDS[word])
    return (yield)


def _number(char: str, emit: Emit) -> Reader[str]:
    digits: list[str] = []
    while char and char in "-+.eE0123456789":
        digits.append(char)
        char = yield
    number = "".join(digits)
    if not NUMBER.fullmatch(number):
        raise BrokenCall
    emit(number)
    return char
