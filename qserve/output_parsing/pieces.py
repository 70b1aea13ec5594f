"""Piece: a piece of a model's text, classified as reasoning, content, or part of a call."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

REASONING = "reasoning"
CONTENT = "content"
NAME = "name"  # name of the tool; starts a call
ARGUMENTS = "arguments"  # next characters of the call's JSON object
BROKEN = "broken"  # the call is not valid after all; the piece has the call's whole text


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
