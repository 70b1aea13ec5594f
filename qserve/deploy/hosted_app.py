"""HostedApp: a server without its listener: the ASGI app beside its engine process.

What puts requests in may be anything: a replica of Ray Serve calls `answer`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from starlette.applications import Starlette

from qserve import logs
from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.routed_request import RoutedRequest
from qserve.engine.process import ENGINE
from qserve.engine.supervisor import EngineSupervisor
from qserve.log_limit import limit_logging
from qserve.server.app import ORDER_OF_ARRIVAL, build_app, load, start_worker
from qserve.server.metrics import Metrics
from qserve.server.preparation import Preparation
from qserve.server.worker import WorkerClient

# Between two pieces of a stream: what comes meanwhile goes with the next. Each piece is a message
# between processes, which takes half a millisecond of both.
PIECE_SECONDS = 0.01
LEAVE_SECONDS = 5.0  # that an app gets to end a request whose client is gone

# status and headers of an answer, then pieces of its body
Head = tuple[int, list[tuple[bytes, bytes]]]
Answer = AsyncGenerator[Head | bytes, None]

logger = logging.getLogger(__name__)


class HostedApp:
    """One engine and its app. Made by `start`, ended by `close`."""

    def __init__(
        self, app: Starlette, client: EngineSupervisor, worker: WorkerClient, watch: asyncio.Task
    ) -> None:
        self.app, self._client, self._worker, self._watch = app, client, worker, watch
        self.num_open = 0  # requests

    @classmethod
    async def start(
        cls, engine_config: EngineConfig, config: ServerConfig, *, engine: str = ENGINE
    ) -> "HostedApp":
        """Load the model. Raises InputError."""
        logs.configure(config.log_level, config.log_format, text="%(message)s")
        limit_logging()
        metrics = Metrics(config.model_names(engine_config.model)[0], config.metrics_prefix)
        tokenizer, client = await load(engine_config, config, engine, metrics)
        metrics.describe_cache(engine_config)
        worker = start_worker(client, tokenizer, config)
        app = build_app(
            client,
            tokenizer,
            config,
            max_num_seqs=engine_config.max_num_seqs,
            metrics=metrics,
            preparation=Preparation(worker),
            priority_counts=engine_config.scheduling_policy not in ORDER_OF_ARRIVAL,
        )
        return cls(app, client, worker, asyncio.create_task(metrics.watch_loop()))

    @property
    def is_alive(self) -> bool:
        """Whether requests can run now, or soon."""
        return self._client.is_alive or self._client.is_restarting

    async def answer(self, request: RoutedRequest) -> Answer:
        """Run one request. Leaving the generator early ends it, as a client that hangs up does."""
        self.num_open += 1
        queue: asyncio.Queue = asyncio.Queue()
        gone = asyncio.Event()
        task = asyncio.create_task(self._run(request, queue, gone))
        try:
            message = await queue.get()
            if message is None:
                task.result()  # raises what the app raised
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
        """End the engine; what still runs ends with an error."""
        self._watch.cancel()
        with contextlib.suppress(Exception):
            await self._client.close()
        await self._worker.close()

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
