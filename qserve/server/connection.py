"""One HTTP exchange: a body within limits, a client that may leave, server-sent events.

Knows no models and no fields.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from qserve.server.errors import ApiError, ClientGone, as_api_error

Result = TypeVar("Result")

# Of one chunk that waits for the client to read. A stream that nobody reads would hold its place
# among the running and queued requests for good.
UNREAD_SECONDS = 120.0

logger = logging.getLogger(__name__)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a JSON request. Raises ApiError: 415 for another form, 413 above the limit."""
    kind = request.headers.get("content-type", "application/json")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected Content-Type: application/json.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        # Unpacking would need a limit of its own: a megabyte can hold a gigabyte of zeros.
        raise ApiError(415, f"expected a body without Content-Encoding, found {encoding}.")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                # uvicorn reads and drops the rest, so that a client that still sends sees this.
                raise ApiError(413, f"expected a body of at most {limit} bytes.")
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves; then raises ClientGone."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Chunks as server-sent events, ended by [DONE].

    An error before the first chunk is a plain HTTP error; a later one is an event of its own. Each
    chunk is fetched when the one before it has been written, so a slow reader slows its own stream
    only. One that reads nothing for UNREAD_SECONDS counts as gone.
    """

    def __init__(self, chunks: AsyncGenerator[dict, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(scope, receive, send))
        except (ClientGone, OSError):
            return

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks)
            except Exception as error:
                await as_api_error(error).response(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_in_time(send, _event(first))
            async for chunk in _errors_as_chunks(chunks):
                await _send_in_time(send, _event(chunk))
            await send(_body(b"data: [DONE]\n\n"))
            await send(_body(b"", more=False))


async def _send_in_time(send: Send, message: dict) -> None:
    try:
        async with asyncio.timeout(UNREAD_SECONDS):
            await send(message)
    except TimeoutError:
        logger.warning("A client read nothing for %.0f s: its stream is dropped", UNREAD_SECONDS)
        raise ClientGone from None


async def _errors_as_chunks(chunks: AsyncGenerator[dict, None]) -> AsyncGenerator[dict, None]:
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield as_api_error(error).envelope


def _event(content: dict) -> dict:
    return _body(b"data: " + msgspec.json.encode(content) + b"\n\n")


def _body(data: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}
