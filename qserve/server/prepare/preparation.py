"""Preparation turns bodies into jobs: clients take turns, long bodies leave the event loop.

Parsing and templates hold the GIL, so a thread helps only for short bodies. Longer bodies go to a
worker process; the shortest are prepared by the caller, since a thread switch would take longer
than the work. If the model has a chat template, requests that may run it go to a worker process of
their own, whatever their length: a template may never terminate, and a process can be killed.
Bodies with images or videos go to further processes, which may wait for other servers and decode
large files.
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

SHORT_BYTES = 2**11  # preparing takes 0.1 to 0.6 ms, 4 ms in the worst case found
LARGE_BYTES = 2**15  # 32 KiB make 2,000 short messages, which take 15 ms to prepare
# Beginnings of each type of a part with an image or a video, as it is in JSON.
MEDIA_TYPES = (b'"image', b'"input_image"', *VIDEO_TYPES)
NUM_THREADS = 3  # one client can use two

Result = TypeVar("Result")


class Worker(Protocol):
    """The part of WorkerClient that Preparation uses."""

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
    """Prepares bodies and runs other work. Without workers it uses threads and the caller."""

    def __init__(
        self,
        worker: Worker | None = None,
        renderer: Worker | None = None,
        media: Sequence[Worker] = (),
    ) -> None:
        """`worker` takes large bodies, `renderer` those that may run the chat template.

        `media` take bodies with images or videos, one each.
        """
        self._worker, self._renderer = worker, renderer
        self.take_media(media)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "preparation")
        self._short, self._long, self._rendered = Turns(NUM_THREADS), Turns(1), Turns(1)

    def take_media(self, workers: Sequence[Worker]) -> None:
        """Give bodies with images or videos to these workers, one each. Before the first body."""
        self._media, self._idle = workers, list(workers)
        self._seen = Turns(max(1, len(workers)))

    async def prepare(
        self, client: str, model: ServedModel, route: str, body: bytes | bytearray, arrival: Arrival
    ) -> Job | bytes:
        """Prepare a body; `route` is a key of JOBS (gives a Job) or ANSWERS (gives the JSON).

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
        worker = self._idle.pop()  # there is one for each turn
        try:
            return await worker.prepare(route, body, arrival, adapters)
        finally:
            self._idle.append(worker)

    async def ready(self) -> None:
        """Wait until chats can be rendered. Raises the error of a worker's start."""
        for worker in filter(None, (self._renderer, *self._media)):
            await worker.ready()

    async def close(self) -> None:
        """End the workers."""
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
    """Prepare a body in this thread. Raises ApiError and InputError."""
    if route in ANSWERS:
        return ANSWERS[route](model, body)
    return JOBS[route](model, body, arrival)


def has_media(body: bytes | bytearray) -> bool:
    """Return True if a body may have a part with an image or a video."""
    return any(each in body for each in MEDIA_TYPES)


async def _in_turn(turns: Turns, client: str, start: Callable[[], Awaitable[Result]]) -> Result:
    """Run work when it is the client's turn. If the client disconnects, the work keeps its slot."""
    await turns.take(client)
    task = asyncio.ensure_future(start())
    task.add_done_callback(lambda _: turns.give_back(client))
    return await asyncio.shield(task)
