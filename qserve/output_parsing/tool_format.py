"""ToolFormat: describes how a model family writes tool calls, and reads them.

A call consists of opening texts (outermost first), the tool's name and a separator, the arguments,
and closing texts (innermost first). A Body is the notation of the arguments. In notations such as
JSON objects the name is inside the body, and the body reads it.
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
NAME_STOPS = '<>{[(`"\n'  # characters that cannot be part of a tool's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Facts on the start of a body, for its reader."""

    marker: str  # the opening text that was found
    char: str  # first character of the body
    name: str = ""  # the tool's name, if it comes before the body


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Notation of arguments, or of whole calls.

    read: reports calls to Calls; returns the characters that it read but did not use
    lark: returns the grammar of one call after its name, or of the whole call if the body has the
        name
    whole: returns the grammar of all calls; used instead of `lark`
    """

    read: Callable[[Calls, Start], Reader[str]]
    lark: Callable[["CallGrammar", int, str, Any], str] | None = None
    whole: Callable[["CallGrammar"], str] | None = None
    # Brackets around the calls, for notations that write calls as a list.
    left: str = ""
    right: str = ""
    texts: tuple[str, ...] = ()  # markers inside the body
    # True: text that is not a call is a message that starts with `left`.
    is_text_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """How a format writes the tool's name before the body."""

    before: str = ""  # prefix in the text that is not part of the tool's name
    is_numbered: bool = False  # True: the index of the call follows, as ":0"

    def read(self, char: str) -> Reader[tuple[str, str]]:
        """Read the name. Returns it, and the first character after it that is not white space."""
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
    also: tuple[str, ...] = ()  # alternative opening texts that models write
    inner: tuple[str, ...] = ()  # texts that start a call if the outer opening texts are missing
    name: Name | None = None  # None: the name is inside the body
    separator: str = ""  # text between name and arguments
    closes: tuple[str, ...] = ()
    also_ends: tuple[str, ...] = ()  # alternative closing texts that models write
    num_shared: int = 0  # number of outer texts (on each side) written once around parallel calls
    between: str = ""  # text between parallel calls
    # Characters that may start calls without a marker, at the start of the text and, after a call,
    # at the start of a line.
    starts: tuple[str, ...] = ()
    is_bare: bool = False  # True: opening texts are optional; calls must name a known tool
    only_one: bool = False  # True: the model ends its turn after one call
    # Pattern of the start of the next call inside a broken call. The matching group is the marker.
    again: re.Pattern[str] | None = None

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that start calls anywhere in an output."""
        own = (text.strip() for text in self.opens[:1] + self.opens[self.num_shared :][:1])
        return tuple(dict.fromkeys((*own, *self.also, *self.inner)))

    def is_outer(self, marker: str) -> bool:
        """Return True if a marker is the outermost opening text of a call."""
        return marker in self.also or marker in (text.strip() for text in self.opens[:1])

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Closing texts, which are dropped directly after a call."""
        return (*(text.strip() for text in self.closes), *self.also_ends)

    @cached_property
    def next_call(self) -> re.Pattern[str] | None:
        """Pattern of the start of another call in the text of a broken call."""
        if self.again is not None or not self.markers:
            return self.again
        return re.compile(f"({'|'.join(map(re.escape, self.markers))})")

    @cached_property
    def stops(self) -> re.Pattern[str]:
        """Pattern of characters that may start a marker, or that matter for `starts`."""
        first = {text[0] for text in (*self.markers, *self.ends)} | (
            {"\n"} if self.starts else set()
        )
        return re.compile(f"[{re.escape(''.join(sorted(first)))}]" if first else r"(?!)")

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Markers of the format that may be special tokens."""
        return tuple(dict.fromkeys(each for text in self._texts() for each in TOKEN.findall(text)))

    def read(self, calls: Calls, marker: str) -> Reader[str]:
        """Read calls after a marker, or after a character of `starts`."""
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
        """Return the opening texts that follow a marker."""
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
    """Read a text that starts with `char`. Returns the next character that is not white space."""
    for expected in text:
        if char != expected:
            raise BrokenCall
        char = yield
    return (yield from after_space(char))
