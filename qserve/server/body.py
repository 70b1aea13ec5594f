"""Body: the body of a JSON request, read within limits of size, time, count and memory.

Knows no fields and no models.
"""

import asyncio

from starlette.requests import ClientDisconnect, Request

from qserve.server.body_scan import SLICE_BYTES, BodyScan
from qserve.server.budget import Hold
from qserve.server.errors import ApiError, ClientGone
from qserve.server.service import Service

BODY_SECONDS = 120.0  # that a body may take to come


class Body:
    """Holds the memory of a body inside a `with` block."""

    def __init__(self, request: Request, client: str, service: Service) -> None:
        self._request, self._client, self._service = request, client, service
        self._holds: list[Hold] = []

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *error: object) -> None:
        for hold in self._holds:
            hold.give_back()

    async def read(self) -> bytearray:
        """All of it. Raises ApiError.

        415: another form; 413: too long; 408: too slow; 400: holds too much; 503: too many bodies.
        """
        headers = self._request.headers
        kind = headers.get("content-type", "application/json")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "expected Content-Type: application/json.")
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            # Unpacking would need a limit of its own: a megabyte can hold a gigabyte of zeros.
            raise ApiError(415, f"expected a body without Content-Encoding, found {encoding}.")
        length = headers.get("content-length", "")
        if length.isdecimal():
            self._check_length(int(length[:20]))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._receive()
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise ApiError(408, f"expected a whole body within {BODY_SECONDS:g} s.") from None

    async def _receive(self) -> bytearray:
        body, scan = bytearray(), BodyScan()
        async for chunk in self._request.stream():
            # uvicorn reads and drops the rest, so that a client that still sends sees the error.
            self._check_length(len(body) + len(chunk))
            hold = self._service.bodies.take(self._client, len(chunk))
            if hold is None:
                raise ApiError(503, "The server has no room for more bodies. Try again later.")
            self._holds.append(hold)
            body += chunk
            if len(chunk) <= SLICE_BYTES:
                scan.feed(chunk)
            else:
                await self._scan(scan, chunk)
        return body

    async def _scan(self, scan: BodyScan, chunk: bytes) -> None:
        for start in range(0, len(chunk), SLICE_BYTES):
            async with self._service.scanning:
                scan.feed(chunk[start : start + SLICE_BYTES])
                await asyncio.sleep(0)

    def _check_length(self, length: int) -> None:
        limit = self._service.max_body_bytes
        if length > limit:
            raise ApiError(413, f"expected a body of at most {limit} bytes.")
