"""Piece: a part of a model's text that is known to be reasoning, content, or part of a call."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

REASONING = "reasoning"
CONTENT = "content"
NAME = "name"  # of the tool; begins a call
ARGUMENTS = "arguments"  # the next characters of the call's JSON object
BROKEN = "broken"  # not a call after all; the piece has the whole text


class Piece(NamedTuple):
    kind: str
    text: str
    call: int = 0  # index of the call in the text


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent pieces of the same kind."""
    return [
        Piece(kind, "".join([piece.text for piece in group]), call)
        for (kind, call), group in groupby(pieces, lambda piece: (piece.kind, piece.call))
    ]
