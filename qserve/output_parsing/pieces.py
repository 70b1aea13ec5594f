"""Piece: a part of a model's text that is known to be reasoning, content, or of a call."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

REASONING = "reasoning"
CONTENT = "content"
NAME = "name"  # of the tool; a call begins with it
ARGUMENTS = "arguments"  # the next characters of the call's JSON object
BROKEN = "broken"  # the call turned out to be none; the piece has its whole text


class Piece(NamedTuple):
    kind: str
    text: str
    call: int = 0  # which call of the text, from 0


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, those that continue one another made one."""
    return [
        Piece(kind, "".join([piece.text for piece in group]), call)
        for (kind, call), group in groupby(pieces, lambda piece: (piece.kind, piece.call))
    ]
