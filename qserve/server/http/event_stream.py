"""Server-sent events, and work that is cancelled when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qserve.server.http.errors import ApiError, ClientGone, as_api_error

Result = TypeVar("Result")
PING_SECONDS = 10.0  # a stream without events for this time sends its ping


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If the client disconnects, cancel it and raise ClientGone."""
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
    """Response that sends chunks as server-sent events, then [DONE] unless the events are named.

    An error before the first chunk becomes an HTTP error; a later error becomes an event. The next
    chunk is fetched after the previous one is written, so a slow reader slows only its own stream.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict, None],
        headers: dict[str, str] | None = None,
        *,
        are_named: bool = False,
        ping: dict | None = None,
        error: Callable[[ApiError], dict] = lambda error: error.envelope,
    ) -> None:
        """Prepare the stream.

        are_named: an event's name is its `type`, and [DONE] is not sent
        ping: event to send after PING_SECONDS without another event
        error: returns the event for an error
        """
        headers = {"Cache-Control": "no-cache"} | (headers or {})
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._chunks = chunks
        self._event = _named_event if are_named else _event
        self._end = b"" if are_named else b"data: [DONE]\n\n"
        self._ping, self._error = ping, error
        self._last_event = 0.0  # by the event loop's clock

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
            pinging = None if self._ping is None else asyncio.create_task(self._send_pings(send))
            try:
                async for chunk in self._errors_as_chunks(chunks):
                    await send(self._event(chunk))
                    if pinging is not None:
                        self._last_event = asyncio.get_running_loop().time()
            finally:
                if pinging is not None:
                    pinging.cancel()
                    await asyncio.gather(pinging, return_exceptions=True)
            await send(_body(self._end, more=False))

    async def _errors_as_chunks(
        self, chunks: AsyncGenerator[dict, None]
    ) -> AsyncGenerator[dict, None]:
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            yield self._error(as_api_error(error))

    async def _send_pings(self, send: Send) -> None:
        """Send a ping after PING_SECONDS without an event, so that clients do not time out."""
        loop = asyncio.get_running_loop()
        self._last_event = loop.time()
        while True:
            quiet = loop.time() - self._last_event
            if quiet < PING_SECONDS:
                await asyncio.sleep(PING_SECONDS - quiet)
                continue
            await send(self._event(self._ping))
            self._last_event = loop.time()


def _event(content: dict) -> dict:
    return _body(b"data: " + msgspec.json.encode(content) + b"\n\n")


def _named_event(content: dict) -> dict:
    name = content.get("type", "error").encode()
    return _body(b"event: " + name + b"\ndata: " + msgspec.json.encode(content) + b"\n\n")


def _body(data: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}
