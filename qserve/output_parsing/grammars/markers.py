"""Lark of texts with markers. A marker may be a token that a grammar can match only by its id."""

from collections.abc import Callable

from qserve.output_parsing.marker_search import MARKED, TOKEN
from qserve.structured.lark_text import quoted

# Text of a marker -> its token id; None: the marker is ordinary text. See Tokenizer.marker_token.
MarkerToken = Callable[[str], int | None]


def no_token(text: str) -> int | None:
    """Return None: the MarkerToken of a model whose markers are ordinary text."""
    return None


def lark_text(text: str, marker_token: MarkerToken) -> str:
    """Return Lark of a text. Markers with a token id become token ids."""
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
    """Return the position of the first marker with a token id; None if there is none."""
    for match in TOKEN.finditer(text):
        if marker_token(match[0]) is not None:
            return match.start()
    return None
