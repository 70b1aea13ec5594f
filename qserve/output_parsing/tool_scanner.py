"""ToolScanner: splits a growing text into content and calls of tools."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.pieces import ARGUMENTS, NAME, Piece, merged
from qserve.output_parsing.reading import BrokenCall, Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls."""

    read: Callable[[Calls, str], Reader[str]]  # from behind what it begins with, which is given
    markers: tuple[str, ...] = ()  # texts that begin calls, wherever they stand
    starts: tuple[str, ...] = ()  # characters that may begin calls where the text begins
    is_forced: bool = False  # by a grammar: what is no whole call was cut, and is no content


class ToolScanner:
    """Gives out content at once, but for what may begin a call and white space before it."""

    def __init__(self, tool_format: ToolFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools`: the JSON schema of each tool's arguments, by its name."""
        self._format = tool_format
        self._calls = Calls(tools)
        self._reader: Reader[str] | None = None
        self._held = ""  # may begin a marker
        self._spaces = ""  # dropped if a call follows
        self._is_start = True

    def push(self, text: str) -> list[Piece]:
        """What is known with these characters."""
        for char in text:
            self._take(char)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The rest, when no more text comes."""
        while self._reader is not None:
            self._advance("")
        held, self._held = self._held, ""
        for char in held:
            self._show(char)
        if not self._calls.count:
            self._calls.content(self._spaces)
        self._spaces = ""
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._calls.pieces = self._calls.pieces, []
        return merged(pieces)

    def _take(self, char: str) -> None:
        if self._reader is None:
            self._look(char)
        else:
            self._calls.raw.append(char)
            self._advance(char)

    def _look(self, char: str) -> None:
        """One character that is no part of a call so far."""
        if self._is_start and not char.isspace():
            self._is_start = False
            if char in self._format.starts:
                self._begin(char)
                return
        self._held += char
        while self._held:
            if self._held in self._format.markers:
                marker, self._held = self._held, ""
                self._begin(marker)
                return
            if any(marker.startswith(self._held) for marker in self._format.markers):
                return
            first, self._held = self._held[0], self._held[1:]
            self._show(first)

    def _show(self, char: str) -> None:
        if char.isspace():
            self._spaces += char
        else:
            self._calls.content(self._spaces + char)
            self._spaces = ""

    def _begin(self, marker: str) -> None:
        self._calls.raw = [self._spaces, marker]
        self._spaces = ""
        self._reader = self._format.read(self._calls, marker)
        next(self._reader)

    def _advance(self, char: str) -> None:
        try:
            self._reader.send(char)
        except StopIteration as stop:
            rest = stop.value
        except BrokenCall:
            # The character that broke it may begin the next call.
            raw = "".join(self._calls.raw)
            if char or not self._format.is_forced:
                self._calls.give_up(raw.removesuffix(char))
            rest = char
        else:
            return
        self._reader = None
        self._calls.raw = []
        for each in rest:
            self._take(each)


class NamedCall:
    """The whole text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        """The name once, and the text."""
        if not text:
            return []
        opening = [] if self._name is None else [Piece(NAME, self._name)]
        self._name = None
        return [*opening, Piece(ARGUMENTS, text)]

    def finish(self) -> list[Piece]:
        return []
