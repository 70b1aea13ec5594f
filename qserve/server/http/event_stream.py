"""Server-sent events, and work that ends when its client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qserve.server.http.errors import ApiError, ClientGone, as_api_error

Result = TypeVar("Result")
PING_SECONDS = 10.0  # without an event, after which a stream sends its ping


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. Cancels it and raises ClientGone if the client disconnects."""
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
    """Chunks as server-sent events, ended by [DONE] unless the events are named.

    An error before the first chunk is a plain HTTP error; a later one is an event. Each chunk is
    fetched after the previous one was written, so a slow reader slows only its own stream.
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
        """`are_named`: each event has its `type` as name, and there is no [DONE].

        `ping`: event that is sent while no other comes. `error`: makes the event of an error.
        """
        headers = {"Cache-Control": "no-cache"} | (headers or {})
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._chunks = chunks
        self._event = _named_event if are_named else _event
        self._end = b"" if are_named else b"data: [DONE]\n\n"
        self._ping, self._error = ping, error
        self._last_event = 0.0  # time of the event loop

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
        """Send the ping whenever PING_SECONDS pass without an event: clients give up otherwise."""
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
