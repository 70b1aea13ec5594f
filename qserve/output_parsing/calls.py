"""Calls: what a format's reader tells of the calls that it reads, and which tools there are."""

from collections.abc import Mapping
from typing import Any

from qserve.output_parsing.pieces import ARGUMENTS, BROKEN, CONTENT, NAME, Piece


class Calls:
    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools`: the JSON schema of each tool's arguments, by its name."""
        self.tools = tools
        self.count = 0  # complete ones, and broken ones whose name was told
        self.raw: list[str] = []  # all that was read since the last call ended
        self.pieces: list[Piece] = []  # taken by who pushes text
        self._is_open = False

    def content(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(CONTENT, text))

    def name(self, name: str) -> None:
        """A call begins."""
        self._is_open = True
        self.pieces.append(Piece(NAME, name, self.count))

    def arguments(self, text: str) -> None:
        self.pieces.append(Piece(ARGUMENTS, text, self.count))

    def end(self) -> None:
        """The call is complete."""
        self._is_open = False
        self.count += 1
        self.raw = []

    def give_up(self, text: str) -> None:
        """What was read is no call; `text` is all of it."""
        if self._is_open:
            self.pieces.append(Piece(BROKEN, text, self.count))
            self.end()
        else:
            self.content(text)
        self.raw = []
