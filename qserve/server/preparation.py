"""Preparation: bodies become jobs, clients in turn, long bodies off the event loop.

Parsing and templates hold the interpreter's lock, so a thread helps only while they are short.
What is longer goes to the worker process, and for the shortest the way to a thread and back would
take longer than the work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from qserve.lora.request import LoRARequest
from qserve.server.job import Job
from qserve.server.jobs import JOBS
from qserve.server.served_model import ServedModel
from qserve.server.turns import Turns

SHORT_BYTES = 2**11  # take 0.1 to 0.6 ms, the worst found 4
LARGE_BYTES = 2**15  # 32 KiB make 2,000 short messages, which take 15 ms to prepare
NUM_THREADS = 3  # one client can have two

Result = TypeVar("Result")


class Worker(Protocol):
    """The part of WorkerClient that is used here."""

    async def prepare(
        self,
        route: str,
        body: bytes | bytearray,
        arrived: float,
        adapters: Mapping[str, LoRARequest],
    ) -> Job: ...


class Preparation:
    """Prepares jobs and runs other work. Without a worker, threads prepare large bodies, too."""

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = worker
        self._threads = ThreadPoolExecutor(NUM_THREADS, "preparation")
        self._short, self._long = Turns(NUM_THREADS), Turns(1)

    async def job(
        self, client: str, model: ServedModel, route: str, body: bytes | bytearray, arrived: float
    ) -> Job:
        """The job of a body of one of the routes in JOBS. Raises ApiError and InputError."""
        if len(body) <= SHORT_BYTES:
            return JOBS[route](model, body, arrived)
        if self._worker is not None and len(body) > LARGE_BYTES:
            return await _in_turn(
                self._long,
                client,
                lambda: self._worker.prepare(route, body, arrived, model.adapters),
            )
        return await self.run(client, JOBS[route], model, body, arrived)

    async def run(self, client: str, work: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function that runs in a thread."""
        loop = asyncio.get_running_loop()
        return await _in_turn(
            self._short, client, lambda: loop.run_in_executor(self._threads, work, *arguments)
        )


async def _in_turn(turns: Turns, client: str, start: Callable[[], Awaitable[Result]]) -> Result:
    """Run work when it is the client's turn. A client that leaves keeps the place until it ends."""
    await turns.take(client)
    task = asyncio.ensure_future(start())
    task.add_done_callback(lambda _: turns.give_back(client))
    return await asyncio.shield(task)
