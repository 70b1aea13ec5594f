"""Calls: collects the tool calls that a format's reader finds, as pieces."""

from collections.abc import Mapping
from typing import Any

from qserve.output_parsing.pieces import ARGUMENTS, BROKEN, CONTENT, NAME, REASONING, Piece
from qserve.output_parsing.reading import BrokenCall


class Calls:
    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, only_known: bool = False) -> None:
        """Start without calls.

        tools: tool name -> JSON schema of its arguments
        only_known: treat calls of unknown tools as text; for formats without a start marker
        """
        self.tools = tools
        self.only_known = only_known
        self.count = 0  # complete calls, and broken calls whose name was emitted
        self.raw: list[str] = []  # text read since the end of the last call
        self.pieces: list[Piece] = []  # the caller takes and clears them
        self.is_open = False  # True between `name` and `end` of a call

    def content(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(CONTENT, text))

    def reasoning(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(REASONING, text))

    def check(self, name: str) -> None:
        """Raise BrokenCall for a name that cannot be a tool's name."""
        if not name or (self.only_known and self.tools and name not in self.tools):
            raise BrokenCall

    def name(self, name: str) -> None:
        """Start a call."""
        self.is_open = True
        self.pieces.append(Piece(NAME, name, self.count))

    def arguments(self, text: str) -> None:
        self.pieces.append(Piece(ARGUMENTS, text, self.count))

    def end(self) -> None:
        """End a complete call."""
        self.is_open = False
        self.count += 1
        self.raw = []

    def give_up(self, text: str) -> None:
        """Treat `text`, the whole text of a call, as content, since it is not a valid call."""
        if self.is_open:
            self.pieces.append(Piece(BROKEN, text, self.count))
            self.end()
        else:
            self.content(text)
        self.raw = []
