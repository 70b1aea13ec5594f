"""ToolFormat: a row that describes how a model family writes tool calls, and its reader.

A call is written as texts that open it (outermost first), the tool's name and a separator, the
arguments, and texts that close it (innermost first). The arguments are in one of a few notations,
each a Body. Bodies of notations with the name inside, such as JSON objects, read it themselves.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.marker_search import TOKEN
from qserve.output_parsing.reading import SPACE, BrokenCall, Reader, after_space

if TYPE_CHECKING:
    from qserve.output_parsing.grammars.call_grammar import CallGrammar

MAX_NAME_CHARS = 256
NAME_STOPS = '<>{[(`"\n'  # characters that no tool's name contains


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a body begins: its reader's arguments besides Calls."""

    marker: str  # the opening text that was found
    char: str  # first character of the body
    name: str = ""  # the tool's name, if it comes before the body


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Notation of arguments, or of whole calls.

    `read`: reports calls and returns the characters that it read but did not use. `lark`: the
    grammar of one call from its name's end on, or from its start if the body has the name.
    """

    read: Callable[[Calls, Start], Reader[str]]
    lark: Callable[["CallGrammar", int, str, Any], str] | None = None
    whole: Callable[["CallGrammar"], str] | None = None  # the grammar of all calls instead
    # Texts around and between the calls of a list, for notations that write calls as a list.
    left: str = ""
    right: str = ""
    texts: tuple[str, ...] = ()  # markers inside
    # Other text is a message with `left` before it.
    is_text_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """The tool's name between two texts of its row; `before` and an index may be part of it."""

    before: str = ""  # part of the name in the text, but not in the tool's name
    is_numbered: bool = False  # ":0" follows, the index of the call

    def read(self, char: str) -> Reader[tuple[str, str]]:
        """The tool's name, and the first character after it and white space."""
        text = ""
        while char and char not in NAME_STOPS and len(text) <= MAX_NAME_CHARS:
            text += char
            char = yield
        name = text.strip().removeprefix(self.before)
        if self.is_numbered:
            name = re.sub(r":\s*[0-9]*$", "", name)
        if not name or any(each in name for each in SPACE):
            raise BrokenCall
        return name, (yield from after_space(char))


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    body: Body
    opens: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # other texts that models open calls with
    inner: tuple[str, ...] = ()  # texts that begin a call if the opening ones are missing
    name: Name | None = None  # None: the body has it
    separator: str = ""  # between name and arguments
    closes: tuple[str, ...] = ()
    also_ends: tuple[str, ...] = ()  # other texts that models close calls with
    num_shared: int = 0  # outer texts on both sides that are written once around parallel calls
    between: str = ""  # between parallel calls
    # Characters that may begin calls at the start of the text and, after a call, at the start of a
    # line.
    starts: tuple[str, ...] = ()
    is_bare: bool = False  # opening texts are optional; the calls must name a tool of the request
    only_one: bool = False  # the model ends its turn after one call
    # Start of a call inside the text of a broken one; the matching group is the marker.
    again: re.Pattern[str] | None = None

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls anywhere in an output."""
        own = (text.strip() for text in self.opens[:1] + self.opens[self.num_shared :][:1])
        return tuple(dict.fromkeys((*own, *self.also, *self.inner)))

    def is_outer(self, marker: str) -> bool:
        """True if a marker is the first one of a call, so that no other is missing."""
        return marker in self.also or marker in (text.strip() for text in self.opens[:1])

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Texts without meaning directly after a call."""
        return (*(text.strip() for text in self.closes), *self.also_ends)

    @cached_property
    def next_call(self) -> re.Pattern[str] | None:
        """Where another call may begin in the text of a broken one."""
        if self.again is not None or not self.markers:
            return self.again
        return re.compile(f"({'|'.join(map(re.escape, self.markers))})")

    @cached_property
    def stops(self) -> re.Pattern[str]:
        """A character that may begin a marker, or matters for `starts`."""
        first = {text[0] for text in (*self.markers, *self.ends)} | (
            {"\n"} if self.starts else set()
        )
        return re.compile(f"[{re.escape(''.join(sorted(first)))}]" if first else r"(?!)")

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens."""
        return tuple(dict.fromkeys(each for text in self._texts() for each in TOKEN.findall(text)))

    def read(self, calls: Calls, marker: str) -> Reader[str]:
        """Read what follows a marker, or a character of `starts`."""
        if marker in self.starts or not marker:
            char = marker or (yield from after_space())
            return (yield from self.body.read(calls, Start(marker=marker, char=char)))
        char = yield from after_space()
        for text in self._inside(marker):
            char = yield from _text(text.strip(), char)
        if self.name is None:
            return (yield from self.body.read(calls, Start(marker=marker, char=char)))
        name, char = yield from self.name.read(char)
        calls.check(name)
        if self.separator and char == self.separator.strip()[0]:
            char = yield from _text(self.separator.strip(), char)
        elif self.separator and char != "{":
            raise BrokenCall
        return (yield from self.body.read(calls, Start(marker=marker, char=char, name=name)))

    def _inside(self, marker: str) -> tuple[str, ...]:
        """Opening texts after a marker."""
        stripped = [text.strip() for text in self.opens]
        return self.opens[stripped.index(marker) + 1 :] if marker in stripped else ()

    def _texts(self) -> Iterator[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                yield value
            elif isinstance(value, tuple):
                yield from value
        yield from (*self.body.texts, self.body.left, self.body.right)


def _text(text: str, char: str) -> Reader[str]:
    """Read a text from its first character on; return the first one after it and white space."""
    for expected in text:
        if char != expected:
            raise BrokenCall
        char = yield
    return (yield from after_space(char))
