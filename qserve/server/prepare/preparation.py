"""Preparation: converts request bodies to jobs. Clients take turns.

Where a body is prepared depends on its size and content:

- on the event loop: up to SHORT_BYTES, since a thread switch would take longer than the work
- in a thread: up to LARGE_BYTES; longer bodies would hold the GIL too long
- in a worker process: longer bodies
- in a second worker process, whatever the size: requests that may run the model's chat template,
  since a template may never terminate, and a process can be killed
- in media worker processes: bodies with images or videos, since they may wait for other servers and
  decode large files
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from qserve.lora.request import LoRARequest
from qserve.server.http.clients import Turns
from qserve.server.prepare.jobs import ANSWERS, JOBS, WITHOUT_TEMPLATE
from qserve.server.prepare.worker import VIDEO_TYPES
from qserve.server.requests.job import Arrival, Job
from qserve.server.requests.served_model import ServedModel

SHORT_BYTES = 2**11  # takes 0.1 to 0.6 ms to prepare, 4 ms in the worst case found
LARGE_BYTES = 2**15  # 2,000 short messages, which take 15 ms to prepare
# How the types of content parts with an image or a video begin in JSON.
MEDIA_TYPES = (b'"image', b'"input_image"', *VIDEO_TYPES)
NUM_THREADS = 3  # one client can use two

Result = TypeVar("Result")


class Worker(Protocol):
    """The methods of WorkerClient that Preparation uses."""

    async def prepare(
        self,
        route: str,
        body: bytes | bytearray,
        arrival: Arrival,
        adapters: Mapping[str, LoRARequest],
    ) -> Job | bytes: ...

    async def ready(self) -> None: ...

    async def close(self) -> None: ...


class Preparation:
    """Prepares bodies, and runs other work in threads. Worker processes are optional."""

    def __init__(
        self,
        worker: Worker | None = None,
        renderer: Worker | None = None,
        media: Sequence[Worker] = (),
    ) -> None:
        """Use these worker processes.

        worker: for large bodies
        renderer: for bodies that may run the chat template
        media: for bodies with images or videos, one body at a time each
        """
        self._worker, self._renderer = worker, renderer
        self.take_media(media)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "preparation")
        self._short, self._long, self._rendered = Turns(NUM_THREADS), Turns(1), Turns(1)

    def take_media(self, workers: Sequence[Worker]) -> None:
        """Set the workers for bodies with images or videos. Call it before the first body."""
        self._media, self._idle = workers, list(workers)
        self._seen = Turns(max(1, len(workers)))

    async def prepare(
        self, client: str, model: ServedModel, route: str, body: bytes | bytearray, arrival: Arrival
    ) -> Job | bytes:
        """Prepare a body. Returns a Job if `route` is in JOBS, the JSON reply if it is in ANSWERS.

        Raises ApiError and InputError.
        """
        if self._media and route not in WITHOUT_TEMPLATE and has_media(body):
            return await _in_turn(
                self._seen, client, lambda: self._read_media(route, body, arrival, model.adapters)
            )
        turns, worker = self._long, self._worker
        if len(body) <= LARGE_BYTES:
            turns, worker = self._rendered, self._renderer
            if route in WITHOUT_TEMPLATE:
                worker = None
        if worker is not None:
            return await _in_turn(
                turns, client, lambda: worker.prepare(route, body, arrival, model.adapters)
            )
        if len(body) <= SHORT_BYTES:
            return prepare(model, route, body, arrival)
        return await self.run(client, prepare, model, route, body, arrival)

    async def _read_media(
        self,
        route: str,
        body: bytes | bytearray,
        arrival: Arrival,
        adapters: Mapping[str, LoRARequest],
    ) -> Job | bytes:
        worker = self._idle.pop()  # not empty: there are as many workers as turns
        try:
            return await worker.prepare(route, body, arrival, adapters)
        finally:
            self._idle.append(worker)

    async def ready(self) -> None:
        """Wait until workers can render chats and read media. Raises a worker's start error."""
        for worker in filter(None, (self._renderer, *self._media)):
            await worker.ready()

    async def close(self) -> None:
        """Stop the workers."""
        for worker in filter(None, (self._worker, self._renderer, *self._media)):
            await worker.close()

    async def run(self, client: str, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function in a thread and return its result."""
        loop = asyncio.get_running_loop()
        return await _in_turn(
            self._short, client, lambda: loop.run_in_executor(self._threads, work, *arguments)
        )


def prepare(
    model: ServedModel, route: str, body: bytes | bytearray, arrival: Arrival
) -> Job | bytes:
    """Prepare a body in the calling thread. Raises ApiError and InputError."""
    if route in ANSWERS:
        return ANSWERS[route](model, body)
    return JOBS[route](model, body, arrival)


def has_media(body: bytes | bytearray) -> bool:
    """Return True if a body may contain an image or a video."""
    return any(each in body for each in MEDIA_TYPES)


async def _in_turn(turns: Turns, client: str, start: Callable[[], Awaitable[Result]]) -> Result:
    """Run work in the client's turn. If the caller is cancelled, the work continues in its slot."""
    await turns.take(client)
    task = asyncio.ensure_future(start())
    task.add_done_callback(lambda _: turns.give_back(client))
    return await asyncio.shield(task)
