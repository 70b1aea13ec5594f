"""Responses of several megabytes, encoded and written in pieces.

Encoding megabytes in one call would hold the GIL, and writing them in one call would block the
event loop. Streams of other requests would stall meanwhile.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 2**16
FEW = 16  # lists up to this length are encoded item by item, since items may be large


class LargeResponse(Response):
    """JSON response, written in pieces as fast as the client reads."""

    def __init__(
        self, pieces: Sequence[bytes], headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        length = str(sum(map(len, pieces)))
        super().__init__(
            None, status, {**(headers or {}), "content-length": length}, "application/json"
        )
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for piece in self._pieces:
            for begin in range(0, len(piece), PIECE_BYTES):
                body = piece[begin : begin + PIECE_BYTES]
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_pieces(content: Any) -> list[bytes]:
    """Encode a value as JSON in pieces of about PIECE_BYTES. NumPy arrays become lists of numbers.

    Call this function in a thread: other threads can run between two pieces.
    """
    found: list[bytes] = []
    parts, size = [], 0
    for part in _parts(content):
        parts.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            found.append(b"".join(parts))
            parts, size = [], 0
    return [*found, b"".join(parts)]


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        opening = b"{"
        for key, each in value.items():
            yield opening + msgspec.json.encode(str(key)) + b":"
            yield from _parts(each)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, np.ndarray) and value.ndim > 1 or _is_short_list(value):
        opening = b"["
        for each in value:
            yield opening
            yield from _parts(each)
            opening = b","
        yield b"]" if len(value) else b"[]"
    elif isinstance(value, list | tuple | np.ndarray):
        yield from _in_slices(value)
    else:
        yield msgspec.json.encode(value)


def _is_short_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= FEW


def _plain(value: Any) -> Any:
    """Return an array as nested lists. Items of long lists may be arrays, too."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _in_slices(items: Sequence[Any] | np.ndarray) -> Iterator[bytes]:
    """Encode a long list, in parts of about PIECE_BYTES."""
    start, count, opening = 0, FEW, b"["
    while start < len(items):
        some = items[start : start + count]
        data = msgspec.json.encode(_plain(some), enc_hook=_plain)
        yield opening + data[1:-1]
        start, opening = start + count, b","
        count = max(1, min(2 * count, count * PIECE_BYTES // len(data)))
    yield b"]" if start else b"[]"
