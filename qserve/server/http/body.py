"""Reads the body of a JSON request, with limits on size, time, number of values, and memory."""

import asyncio
from typing import Protocol

from starlette.requests import ClientDisconnect, Request

from qserve.server.http.clients import Budget, Hold
from qserve.server.http.errors import ApiError, ClientGone

# Characters to count outside of JSON strings, their limit, and what they begin or separate.
LIMITS = (
    (b"[{", 2**15, "lists and objects"),
    (b":", 2**15, "fields"),
    (b",", 2**20, "values"),
)
SLICE_BYTES = 2**15  # takes at most 1 ms to scan, whatever the content
_COUNTED = b"".join(characters for characters, *_ in LIMITS)
_SKIPPED = bytes(set(range(256)) - set(_COUNTED + b'"'))


async def small_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of an operator's request. Raises ApiError(413)."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > max_bytes:
            raise ApiError(
                413, f"expected a body of at most {max_bytes} bytes.", "Send a smaller body."
            )
    return data


class BodyScan:
    """Counts the values of a JSON body while the body arrives, before anything is parsed.

    The time to parse depends on the number of values, not of bytes: 7 MB of one text take 8 ms,
    7 MB of unknown fields 330 ms. If the body is not JSON, the counts have no meaning.
    """

    def __init__(self) -> None:
        self._counts = [0] * len(LIMITS)
        self._in_text = False
        self._half_escape = False  # the last piece ended inside an escape, after the backslash

    def feed(self, data: bytes) -> None:
        """Count the next piece. Raises ApiError(400) once a count exceeds its limit."""
        if self._half_escape:
            data, self._half_escape = b"\\" + data, False
        if b"\\" in data:
            num_last = len(data) - len(data.rstrip(b"\\"))
            if num_last % 2:
                data, self._half_escape = data[:-1], True
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = data.translate(None, _SKIPPED).split(b'"')
        outside = b"".join(pieces[self._in_text :: 2])
        self._in_text ^= len(pieces) % 2 == 0
        for index, (characters, limit, what) in enumerate(LIMITS):
            self._counts[index] += sum(outside.count(each) for each in characters)
            if self._counts[index] > limit:
                raise ApiError(
                    400, f"expected at most {limit} {what} in a body.", "Send a smaller body."
                )


BODY_SECONDS = 120.0  # time limit for receiving a body


class BodyLimits(Protocol):
    """The attributes of Service that Body uses."""

    max_body_bytes: int
    bodies: Budget  # bytes of bodies that are in memory
    scanning: asyncio.Lock


class Body:
    """Context manager: reserves memory for a request's body and releases it at the end."""

    def __init__(self, request: Request, client: str, limits: BodyLimits) -> None:
        self._request, self._client, self._limits = request, client, limits
        self._holds: list[Hold] = []

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *error: object) -> None:
        for hold in self._holds:
            hold.give_back()

    async def read(self) -> bytearray:
        """Return the whole body. Raises ApiError.

        413: too long
        415: not JSON, or compressed
        408: too slow
        400: too many values
        503: all memory for bodies is in use
        """
        headers = self._request.headers
        # A web page of another site may send other content types, or none, without a CORS
        # preflight, and a server without API keys would answer.
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            found = repr(kind[:100]) if kind else "none"
            raise ApiError(
                415, f"expected Content-Type: application/json, found {found}.", "Set this header."
            )
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            # Decompression would need its own limit: a megabyte can hold a gigabyte of zeros.
            raise ApiError(
                415,
                f"expected a body without Content-Encoding, found {encoding}.",
                "Send the body uncompressed.",
            )
        length = headers.get("content-length", "")
        if length.isdecimal():
            self._check_length(int(length[:20]))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._receive()
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise ApiError(
                408,
                f"expected a complete body within {BODY_SECONDS:g} s.",
                "Send the request again.",
            ) from None

    async def _receive(self) -> bytearray:
        body, scan = bytearray(), BodyScan()
        async for chunk in self._request.stream():
            # uvicorn drops the rest of the body, so a client that is still sending gets the error.
            self._check_length(len(body) + len(chunk))
            hold = self._limits.bodies.take(self._client, len(chunk))
            if hold is None:
                raise ApiError(503, "The server holds too many request bodies.", "Try again later.")
            self._holds.append(hold)
            body += chunk
            if len(chunk) <= SLICE_BYTES:
                scan.feed(chunk)
            else:
                await self._scan(scan, chunk)
        return body

    async def _scan(self, scan: BodyScan, chunk: bytes) -> None:
        for start in range(0, len(chunk), SLICE_BYTES):
            async with self._limits.scanning:
                scan.feed(chunk[start : start + SLICE_BYTES])
                await asyncio.sleep(0)

    def _check_length(self, length: int) -> None:
        limit = self._limits.max_body_bytes
        if length > limit:
            raise ApiError(
                413, f"expected a body of at most {limit} bytes.", "Send a smaller body."
            )
