"""Lark of texts that contain markers, each of which may be a token of the model."""

from collections.abc import Callable

from qserve.output_parsing.marker_search import MARKED, TOKEN
from qserve.structured.grammar import quoted

MarkerToken = Callable[[str], int | None]  # id of a token that no text matches


def no_token(text: str) -> int | None:
    """The MarkerToken of a model whose markers are ordinary texts."""
    return None


def lark_text(text: str, marker_token: MarkerToken) -> str:
    """Lark of a text: tokens where the model has one that no text matches."""
    parts, plain = [], ""
    for piece in MARKED.split(text):
        token = marker_token(piece) if TOKEN.fullmatch(piece) else None
        if token is None:
            plain += piece
            continue
        parts += [quoted(plain)] * bool(plain) + [f"<[{token}]>"]
        plain = ""
    return " ".join(parts + [quoted(plain)] * bool(plain))


def first_token(text: str, marker_token: MarkerToken) -> int | None:
    """Position of the first marker that is a token; None if there is none."""
    for match in TOKEN.finditer(text):
        if marker_token(match[0]) is not None:
            return match.start()
    return None
