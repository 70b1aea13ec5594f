"""Reader of calls in Python's notation: [get_weather(city='Paris', days=3)]."""

import json
import math
import re

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.reading import (
    BrokenCall,
    Emit,
    Reader,
    after_space,
    json_escaped,
    read_whole,
    until,
)
from qserve.output_parsing.tool_format import Start

WORDS = {"True": "true", "False": "false", "None": "null"}
WORDS |= {word: word for word in WORDS.values()}  # models confuse Python and JSON
# escape character -> its text
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
MAX_PLAIN = 64  # maximum number of characters of a number or word
SEPARATORS = ",;"  # between calls
NAME = re.compile(r"[A-Za-z_][\w.-]*")
# Start of the next call inside the text of a broken call. The group is the marker.
AGAIN = re.compile(r"\)\s*(?:\]\s*)?(?:[,;]\s*)?(?:\[\s*)?()[A-Za-z_][\w.-]*\(")
CLOSING = {"[": "]", "(": ")", "{": "}"}
QUOTES = ("'", '"')
CODES = {"x": 2, "u": 4, "U": 8}  # escape character -> number of hexadecimal digits


def pythonic(calls: Calls, start: Start) -> Reader[str]:
    """Read [f(a=1), g()], with or without markers around it; brackets are optional with markers.

    Between calls there may be commas, semicolons, white space, or nothing. Without markers there
    may be several lists. If `start` has no marker, the first call is inside a list.
    """
    char, is_alone = start.char, start.marker in ("", "[")
    has_brackets = char == "[" or is_alone
    if char == "[":
        char = yield from after_space()
    while True:
        rest, _ = yield from until("(")
        name = (char + rest).strip()
        calls.check(name)
        if not NAME.fullmatch(name):
            raise BrokenCall
        calls.name(name)
        yield from _arguments(calls.arguments)
        calls.end()
        char = yield from after_space(also=SEPARATORS)
        if char == "]" and has_brackets:
            if not is_alone:
                return ""
            calls.raw = []
            char = yield from after_space(also=SEPARATORS)
            if char != "[":
                return "".join(calls.raw) if char else ""
        if char == "[":
            char = yield from after_space()
        if not char or (char == "<" and not is_alone):
            return char


def _arguments(emit: Emit) -> Reader[None]:
    """Read keyword arguments, and emit a JSON object. The opening bracket has been read."""
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


def literal_as_json(text: str) -> str:
    """Convert a Python literal to JSON. Raises ValueError if the text is not one literal."""
    parts: list[str] = []
    try:
        if text and read_whole(_literal(text[0], parts.append), text[1:]):
            return "".join(parts)
    except BrokenCall:
        pass
    raise ValueError(text)


def _literal(char: str, emit: Emit) -> Reader[str]:
    """Read a literal, and emit it as JSON. Returns the character after the literal."""
    closing: list[str] = []  # closing brackets to come, in Python's notation
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
            char = yield from _string(char, emit)
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
    """Read a dict key and its colon. Returns the first character of the value.

    A key that is a number or a word becomes a string, as in Python's json module.
    """
    if char in QUOTES:
        char = yield from _string(char, emit)
    else:
        parts: list[str] = []
        char = yield from _plain(char, parts.append)
        emit(json.dumps("".join(parts)))
    if (yield from after_space(char)) != ":":
        raise BrokenCall
    emit(": ")
    return (yield from after_space())


def _string(quote: str, emit: Emit) -> Reader[str]:
    """Read a string, which may be triple-quoted. Returns the character after it.

    Line breaks are accepted in every string, since models write code with line breaks.
    """
    emit('"')
    char = yield
    if char == quote:
        char = yield
        if char != quote:
            emit('"')
            return char
        yield from _text(3 * quote, (yield), emit)
    else:
        yield from _text(quote, char, emit)
    emit('"')
    return (yield)


def _text(end: str, char: str, emit: Emit) -> Reader[None]:
    """Read the text of a string, which starts with `char`, and its closing quotes."""
    held = ""  # characters that may start the closing quotes
    while True:
        if not char:
            raise BrokenCall
        if char == end[0]:
            held += char
            if held == end:
                return
        else:
            if char == "\\":
                char = yield from _escape()
            # Keep surrogates escaped: JSON joins a pair to one character, Python does not.
            is_half = "\ud800" <= char <= "\udfff"
            text = held + char
            emit(json.dumps(text)[1:-1] if is_half else json_escaped(text))
            held = ""
        char = yield


def _escape() -> Reader[str]:
    """Read an escape after its backslash. Returns its text."""
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
    """Read a number or a word."""
    parts: list[str] = []
    while char and (char.isalnum() or char in "+-._") and len(parts) < MAX_PLAIN:
        parts.append(char)
        char = yield
    text = "".join(parts)
    if text in WORDS:
        emit(WORDS[text])
        return char
    try:
        number = int(text, 0) if text.isascii() and text[-1:].isalnum() else _float(text)
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
