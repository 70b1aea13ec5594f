"""Piece: a part of a model's text that is known to be reasoning, content, or of a call."""

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


def add(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or lengthen the last one if it goes on."""
    if pieces and piece.kind not in (NAME, BROKEN):
        last = pieces[-1]
        if last.kind == piece.kind and last.call == piece.call:
            pieces[-1] = last._replace(text=last.text + piece.text)
            return
    pieces.append(piece)
