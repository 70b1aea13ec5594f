"""Calls: receives the calls that a format's reader finds, and knows the tools."""

from collections.abc import Mapping
from typing import Any

from qserve.output_parsing.pieces import ARGUMENTS, BROKEN, CONTENT, NAME, REASONING, Piece
from qserve.output_parsing.reading import BrokenCall


class Calls:
    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, only_known: bool = False) -> None:
        """`tools`: tool name -> JSON schema of its arguments.

        `only_known`: a call of another tool is text. True where no marker says that calls begin.
        """
        self.tools = tools
        self.only_known = only_known
        self.count = 0  # complete calls, and broken ones whose name was emitted
        self.raw: list[str] = []  # text read since the last call ended
        self.pieces: list[Piece] = []  # consumed by the caller of `push`
        self.is_open = False  # between `name` and `end` of a call

    def content(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(CONTENT, text))

    def reasoning(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(REASONING, text))

    def check(self, name: str) -> None:
        """Raise BrokenCall for a name that cannot be a tool's here."""
        if not name or (self.only_known and self.tools and name not in self.tools):
            raise BrokenCall

    def name(self, name: str) -> None:
        """Begin a call."""
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
        """Treat the text as content: it is not a call. `text` is all of it."""
        if self.is_open:
            self.pieces.append(Piece(BROKEN, text, self.count))
            self.end()
        else:
            self.content(text)
        self.raw = []
