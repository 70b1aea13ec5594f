"""ModelTurns: several models share one device's memory; one is awake, the others sleep."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from formats.errors import InputError, one_line
from qserve.engine.control.commands import WAIT, AnyCommand, Outcome, Sleep, WakeUp
from qserve.server.http.errors import ApiError

logger = logging.getLogger(__name__)


class Sleeper(Protocol):
    """The method of an engine's client that ModelTurns uses."""

    async def operate(self, command: AnyCommand) -> tuple[Outcome, str]: ...


async def fall_asleep(client: Sleeper, name: str) -> None:
    """Move a model's weights to host memory and free its KV pages. Raises InputError."""
    _, problem = await client.operate(Sleep(level=1, mode=WAIT))
    if problem:
        raise InputError(name, f"cannot sleep: {problem}", "serve it with --memory-sharing split")


class ModelTurns:
    """Decides which of several models on one device is awake. Use it on one event loop only.

    A request for the awake model starts immediately. A request for another model waits until the
    running requests have finished. Then the awake model goes to sleep and the other one wakes up.
    While such a request waits, the awake model accepts new requests only until `seconds` after its
    wake-up.
    """

    def __init__(
        self,
        clients: Sequence[Sleeper],
        seconds: float,
        *,
        awake: int | None = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`awake`: index of the model that is awake now; None: all sleep."""
        self._clients, self._seconds, self._clock = clients, seconds, clock
        self._awake = awake
        self._woken_at = clock()
        self._num_running = 0
        # index of a model -> waiting requests, in order of arrival
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._change: asyncio.Task[None] | None = None

    async def enter(self, index: int) -> None:
        """Wait until a model is awake. Then the caller must call `leave`. Raises ApiError(503)."""
        if self._is_open(index):
            self._num_running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(index, []).append(turn)
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()
            else:
                self._forget(index, turn)
            raise

    def leave(self) -> None:
        """End a request."""
        self._num_running -= 1
        self._advance()

    def _is_open(self, index: int) -> bool:
        """Return True if a new request for a model may start now."""
        if self._change is not None or index != self._awake:
            return False
        others_wait = any(each != index for each in self._waiting)
        return not others_wait or self._clock() - self._woken_at < self._seconds

    def _advance(self) -> None:
        """If no request is running, wake up the model whose requests have waited longest."""
        if self._num_running or self._change is not None or not self._waiting:
            return
        index = next(iter(self._waiting))
        if index == self._awake:
            self._start(index)
        else:
            self._change = asyncio.get_running_loop().create_task(self._change_to(index))

    def _start(self, index: int) -> None:
        """Start the waiting requests of the model that is awake."""
        self._woken_at = self._clock()
        for turn in self._waiting.pop(index, []):
            if not turn.done():
                self._num_running += 1
                turn.set_result(None)

    async def _change_to(self, index: int) -> None:
        problem = ""
        if self._awake is not None:
            problem = await self._operate(self._awake, Sleep(level=1, mode=WAIT))
        if not problem:
            self._awake = None
            problem = await self._operate(index, WakeUp())
        self._change = None
        if problem:
            for turn in self._waiting.pop(index, []):
                if not turn.done():
                    turn.set_exception(
                        ApiError(
                            503,
                            f"The model did not wake up: {problem}.",
                            "Try again later; the server's log has the reason.",
                        )
                    )
        else:
            self._awake = index
            self._start(index)
        self._advance()

    async def _operate(self, index: int, command: AnyCommand) -> str:
        """Run a command in a model's engine. Returns the problem, or ""."""
        try:
            return (await self._clients[index].operate(command))[1]
        except Exception as error:  # the engine is dead, which also stops the server
            logger.warning("%s failed: %s", type(command).__name__, one_line(error))
            return one_line(error)

    def _forget(self, index: int, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(index, [])
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[index]
