"""Reading a text character by character, however it is cut into pieces.

A reader is a generator: it gets one character for each `yield`, and "" when the text has ended. Its
result cannot depend on how the text came. It returns what it has read and does not need, which is
read again as content, and raises BrokenCall where the text is no call. It reads each character
once.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Reader = Generator[None, str, Result]
Emit = Callable[[str], object]


class BrokenCall(Exception):
    """What looked like a call is none."""


def after_space(char: str | None = None, emit: Emit = len) -> Reader[str]:
    """The first character that is no white space, from `char` on if it is given."""
    if char is None:
        char = yield
    while char and char in " \t\r\n":
        emit(char)
        char = yield
    return char


def expect(text: str) -> Reader[None]:
    """Exactly this text, next."""
    for expected in text:
        if (yield) != expected:
            raise BrokenCall


def skip(text: str, char: str | None = None) -> Reader[str]:
    """White space, and the text if it stands there. Returns what was read of something else."""
    char = yield from after_space(char)
    read = ""
    while True:
        read += char
        if read == text:
            return ""
        if not char or not text.startswith(read):
            return read
        char = yield


def until(ends: str, limit: int = 256) -> Reader[tuple[str, str]]:
    """A name, and the character of `ends` behind it."""
    name = ""
    while True:
        char = yield
        if not char or len(name) > limit:
            raise BrokenCall
        if char in ends:
            return name, char
        name += char
