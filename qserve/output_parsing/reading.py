"""Character-wise readers of text, independent of how it is split into pieces.

A reader is a generator: each `yield` receives one character, and "" at the end of the text. The
result therefore cannot depend on the pieces. A reader returns the characters that it read but did
not use, which are read again as content. It raises BrokenCall if the text is not a call. A text
that breaks late may be read again from the start of another call, within a limit (tool_scanner.py).
"""

import json
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Reader = Generator[None, str, Result]
Emit = Callable[[str], object]

SPACE = " \t\r\n"


def json_escaped(text: str) -> str:
    """A text inside of a JSON string."""
    return text if text.isalnum() or text == " " else json.dumps(text, ensure_ascii=False)[1:-1]


class BrokenCall(Exception):
    """A text that looked like a call is not one."""


def after_space(char: str | None = None, emit: Emit = len, also: str = "") -> Reader[str]:
    """First character that is not white space and not in `also`, from `char` on if given."""
    if char is None:
        char = yield
    while char and (char in SPACE or char in also):
        emit(char)
        char = yield
    return char


def expect(text: str) -> Reader[None]:
    """Read exactly this text."""
    for expected in text:
        if (yield) != expected:
            raise BrokenCall


def skip(text: str, char: str | None = None) -> Reader[str]:
    """Read white space and the text, or a prefix of it at the end of the output.

    Returns what was read of anything else.
    """
    char = yield from after_space(char)
    read = ""
    while True:
        read += char
        if read == text or (not char and text.startswith(read)):
            return ""
        if not text.startswith(read):
            return read
        char = yield


def until(ends: str, limit: int = 256) -> Reader[tuple[str, str]]:
    """Read a name and the character of `ends` after it. A name has no line break and no `<`."""
    name = ""
    while True:
        char = yield
        if not char or char in "<\n" or len(name) > limit:
            raise BrokenCall
        if char in ends:
            return name, char
        name += char


def read_whole(reader: Reader[str], text: str) -> bool:
    """Start a reader; return True if it takes exactly this text. Raises BrokenCall."""
    next(reader)
    for place, char in enumerate((*text, "")):
        try:
            reader.send(char)
        except StopIteration as stop:
            return place == len(text) and not stop.value
    return False
