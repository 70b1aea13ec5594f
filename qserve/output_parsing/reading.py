"""Readers of model output, as generators that get one character at a time.

Each `yield` of a reader receives a character, and "" at the end of the text. So the result cannot
depend on how the text was split. A reader returns the characters that it read but did not use; they
are read again as content. It raises BrokenCall if the text is not a call. Then the text may be read
again from the start of another call, within a limit (tool_scanner.py).
"""

import json
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Reader = Generator[None, str, Result]
Emit = Callable[[str], object]

SPACE = " \t\r\n"


def json_escaped(text: str) -> str:
    """Escape a text for use inside a JSON string."""
    return text if text.isalnum() or text == " " else json.dumps(text, ensure_ascii=False)[1:-1]


class BrokenCall(Exception):
    """The text is not a valid call."""


def after_space(char: str | None = None, emit: Emit = len, also: str = "") -> Reader[str]:
    """Skip white space and characters in `also`. Returns the first other character.

    `char`: first character to look at; None: read it.
    """
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
    """Read white space and `text`, or a prefix of `text` at the end of the output.

    Returns "", or the characters read if another text follows.
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
    """Read a name and the character after it, which is in `ends`. Returns both.

    A name contains no line break and no "<".
    """
    name = ""
    while True:
        char = yield
        if not char or char in "<\n" or len(name) > limit:
            raise BrokenCall
        if char in ends:
            return name, char
        name += char


def read_whole(reader: Reader[str], text: str) -> bool:
    """Run a reader on a text. Returns True if it uses exactly the text. Raises BrokenCall."""
    next(reader)
    for place, char in enumerate((*text, "")):
        try:
            reader.send(char)
        except StopIteration as stop:
            return place == len(text) and not stop.value
    return False
