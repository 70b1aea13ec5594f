"""Calls written as a Python list of calls with literals: [get_weather(city='Paris', days=3)]"""

import json
import math

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.reading import BrokenCall, Emit, Reader, after_space, skip, until

START, END = "<|python_start|>", "<|python_end|>"
WORDS = {"True": "true", "False": "false", "None": "null"}
# of a backslash and this character
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
MAX_PLAIN = 64  # characters of a number
CLOSING = {"[": "]", "(": ")", "{": "}"}
QUOTES = ("'", '"')
CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits behind it


def pythonic(calls: Calls, marker: str) -> Reader[str]:
    """[f(a=1), g()], between Llama 4's markers or alone. Other lists are content."""
    if marker == START and (yield from after_space()) != "[":
        raise BrokenCall
    while True:
        first = yield from after_space()
        rest, _ = yield from until("(")
        name = (first + rest).strip()
        if name not in calls.tools:
            raise BrokenCall
        calls.name(name)
        yield from _arguments(calls.arguments)
        calls.end()
        char = yield from after_space()
        if char == "]":
            return (yield from skip(END)) if marker == START else ""
        if char != ",":
            raise BrokenCall


def _arguments(emit: Emit) -> Reader[None]:
    """Arguments by keyword, as a JSON object; the opening bracket has been read."""
    keys: set[str] = set()
    char = yield from after_space()
    while char != ")":
        rest, _ = yield from until("=")
        key = (char + rest).strip()
        if not key.isidentifier() or key in keys:
            raise BrokenCall
        emit(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        char = yield from _literal((yield from after_space()), emit)
        char = yield from after_space(char)
        if char == ",":
            char = yield from after_space()
        elif char != ")":
            raise BrokenCall
    emit("}" if keys else "{}")


def _literal(char: str, emit: Emit) -> Reader[str]:
    """Reads a literal and emits it as JSON; returns the character behind it."""
    closing: list[str] = []  # as Python writes it; JSON has no tuples
    while True:
        if char in CLOSING:
            emit("{" if char == "{" else "[")
            end = CLOSING[char]
            char = yield from after_space()
            if char != end:
                closing.append(end)
                if end == "}":
                    char = yield from _key(char, emit)
                continue
            emit("}" if end == "}" else "]")
            char = yield
        elif char in QUOTES:
            yield from _string(char, emit)
            char = yield
        else:
            char = yield from _plain(char, emit)
        while closing:
            char = yield from after_space(char)
            if char == ",":
                char = yield from after_space()
                if char != closing[-1]:
                    emit(", ")
                    if closing[-1] == "}":
                        char = yield from _key(char, emit)
                    break
            if char != closing[-1]:
                raise BrokenCall
            emit("}" if closing.pop() == "}" else "]")
            char = yield
        else:
            return char


def _key(char: str, emit: Emit) -> Reader[str]:
    """A key of a dict and its colon; returns the first character of the value."""
    if char not in QUOTES:
        raise BrokenCall
    yield from _string(char, emit)
    if (yield from after_space()) != ":":
        raise BrokenCall
    emit(": ")
    return (yield from after_space())


def _string(quote: str, emit: Emit) -> Reader[None]:
    emit('"')
    while (char := (yield)) != quote:
        if not char or char == "\n":
            raise BrokenCall
        if char == "\\":
            char = yield from _escape()
        emit(json.dumps(char, ensure_ascii=False)[1:-1])
    emit('"')


def _escape() -> Reader[str]:
    """The text of an escape whose backslash has been read."""
    char = yield
    if char in CODES:
        digits = ""
        for _ in range(CODES[char]):
            digits += yield
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise BrokenCall from None
    if not char:
        raise BrokenCall
    return ESCAPES.get(char, "\\" + char)


def _plain(char: str, emit: Emit) -> Reader[str]:
    """A number or a word."""
    parts: list[str] = []
    while char and (char.isalnum() or char in "+-._") and len(parts) < MAX_PLAIN:
        parts.append(char)
        char = yield
    text = "".join(parts)
    if text in WORDS:
        emit(WORDS[text])
        return char
    try:
        number = int(text)
    except ValueError:
        number = _float(text)
    emit(json.dumps(number))
    return char


def _float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BrokenCall from None
    if not math.isfinite(number):
        raise BrokenCall
    return number
