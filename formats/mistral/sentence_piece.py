"""Read the tokens of a SentencePiece model (tokenizer.model), a message of protocol buffers.

Fields that are read: 1 of the model, once for each token; in it 1 the text, 2 the score (float32)
and 3 the kind (1 normal, 2 unknown, 3 control, 4 defined by the user, 5 unused, 6 a byte).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from formats.errors import CHECK_ACCESS, CheckpointError
from formats.files.json_file import size_of_file

MAX_BYTES = 2**26
NORMAL = 1
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
REMEDY = "download it again"


class Piece(NamedTuple):
    """One token."""

    text: str
    score: float
    kind: int


def read_pieces(path: Path) -> list[Piece]:
    """Return the tokens in the order of their ids. Raises CheckpointError."""
    try:
        size = size_of_file(path)
        if size > MAX_BYTES:
            raise CheckpointError(str(path), f"has {size} bytes, more than {MAX_BYTES}", REMEDY)
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error.strerror}", CHECK_ACCESS
        ) from None
    try:
        found = [_piece(value) for field, value in _fields(data) if field == 1]
    except (IndexError, ValueError, struct.error, TypeError):
        found = []
    if not found:
        raise CheckpointError(str(path), "is not a SentencePiece model", REMEDY)
    return found


def _piece(data: bytes | int) -> Piece:
    if isinstance(data, int):
        raise ValueError
    text, score, kind = "", 0.0, NORMAL
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value.decode()
        elif field == 2 and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif field == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and value of each field. Raises IndexError and ValueError."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _number(data, at)
            yield field, value
            continue
        if kind == _BYTES:
            length, at = _number(data, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError
        if at + length > len(data):
            raise IndexError
        yield field, data[at : at + length]
        at += length


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, the lowest first, and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError
