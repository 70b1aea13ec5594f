"""HostedApp: the server's ASGI app and its engine process, without a listening socket.

A replica of Ray Serve passes requests to `answer`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator

from starlette.applications import Starlette

from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.routed_request import RoutedRequest
from qserve.engine.ipc.waiting import ENGINE
from qserve.processes import logs
from qserve.processes.log_limit import limit_logging
from qserve.server.app import app_of, open_store
from qserve.server.hosted_model import HostedModel
from qserve.server.store.store import ResponseStore

# Minimum interval between two pieces of a stream; output in between is sent with the next piece.
# Each piece is a message between processes, which costs each of them half a millisecond.
PIECE_SECONDS = 0.01
LEAVE_SECONDS = 5.0  # time limit for the app to end a request whose client has disconnected

# An answer: first status and headers, then pieces of the body
Head = tuple[int, list[tuple[bytes, bytes]]]
Answer = AsyncGenerator[Head | bytes, None]

logger = logging.getLogger(__name__)


class HostedApp:
    """One engine process and its app. Create it with `start`, end it with `close`."""

    def __init__(self, model: HostedModel, app: Starlette, store: ResponseStore | None) -> None:
        self._model, self.app, self._store = model, app, store
        self.num_open = 0  # number of requests in progress

    @classmethod
    async def start(
        cls, engine_config: EngineConfig, config: ServerConfig, *, engine: str = ENGINE
    ) -> "HostedApp":
        """Start the engine, load the model and build the app. Raises InputError."""
        logs.configure(config.log_level, config.log_format, text="%(message)s")
        limit_logging()
        store = open_store(config)
        model = await HostedModel.start(engine_config, config, engine=engine, store=store)
        return cls(model, app_of([model.service], config), store)

    @property
    def is_alive(self) -> bool:
        """True if the engine runs or is being restarted."""
        return self._model.is_alive

    async def answer(self, request: RoutedRequest) -> Answer:
        """Run one request. Closing the generator early aborts it, as a client's disconnect does."""
        self.num_open += 1
        queue: asyncio.Queue = asyncio.Queue()
        gone = asyncio.Event()
        task = asyncio.create_task(self._run(request, queue, gone))
        try:
            message = await queue.get()
            if message is None:
                task.result()  # raises the app's exception
                raise RuntimeError("the app ended without an answer")
            yield message["status"], list(message["headers"])
            is_last = False
            while not is_last:
                messages = [await queue.get()]
                while not queue.empty():
                    messages.append(queue.get_nowait())
                is_last = messages[-1] is None or not messages[-1].get("more_body", False)
                yield b"".join(each.get("body", b"") for each in messages if each is not None)
                if not is_last:
                    await asyncio.sleep(PIECE_SECONDS)
        finally:
            gone.set()
            if not task.done():
                await asyncio.wait([task], timeout=LEAVE_SECONDS)
            task.cancel()
            self.num_open -= 1

    async def close(self) -> None:
        """Stop the engine; running requests end with an error."""
        await self._model.close()
        if self._store is not None:
            self._store.close()

    async def _run(self, request: RoutedRequest, queue: asyncio.Queue, gone: asyncio.Event) -> None:
        is_read = False

        async def receive() -> dict:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": request.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            queue.put_nowait(message)

        try:
            await self.app(request.scope(), receive, send)
        finally:
            queue.put_nowait(None)
