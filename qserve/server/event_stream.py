"""Replies that last: a client that may leave meanwhile, and server-sent events.

Knows no models and no fields.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qserve.server.errors import ClientGone, as_api_error

Result = TypeVar("Result")


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
    """Chunks as server-sent events, ended by [DONE] unless they are named.

    An error before the first chunk is a plain HTTP error; a later one is an event of its own. Each
    chunk is fetched when the one before it has been written, so a slow reader slows its own stream
    only.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict, None],
        headers: dict[str, str] | None = None,
        *,
        are_named: bool = False,
    ) -> None:
        """`are_named`: each event has its `type` as a name, and no [DONE] ends them."""
        headers = {"Cache-Control": "no-cache"} | (headers or {})
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._chunks = chunks
        self._event = _named_event if are_named else _event
        self._end = b"" if are_named else b"data: [DONE]\n\n"

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
            await send(self._event(first))
            async for chunk in _errors_as_chunks(chunks):
                await send(self._event(chunk))
            await send(_body(self._end, more=False))


async def _errors_as_chunks(chunks: AsyncGenerator[dict, None]) -> AsyncGenerator[dict, None]:
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield as_api_error(error).envelope


def _event(content: dict) -> dict:
    return _body(b"data: " + msgspec.json.encode(content) + b"\n\n")


def _named_event(content: dict) -> dict:
    name = content.get("type", "error").encode()
    return _body(b"event: " + name + b"\ndata: " + msgspec.json.encode(content) + b"\n\n")


def _body(data: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}
