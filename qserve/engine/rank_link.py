"""The leader's line to one other rank: calls go there, replies come back. Knows no tensors.

Calls and replies are tuples of a name and values (packing.py) in frames. A call is not answered
unless the leader asks for a reply. What takes long is begun: a thread of the rank does it, beside
the calls that follow, and the reply comes when it is done, with the number that the call had.
"""

import itertools
import logging
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from formats.errors import InputError
from qserve import frames
from qserve.engine.packing import pack, unpack

SEND_BUFFER_BYTES = 4 * 2**20  # a long step is not held up by a rank that still computes the last
FAILED = "failed"  # a reply: subject, problem, remedy of what ended the rank
BEGIN = "begin"  # a call: a number, the name and values of what a thread does
DONE = "done"  # a reply: the number, the result
REFUSED = "refused"  # a reply: the number, the subject, problem, remedy of why there is none

logger = logging.getLogger(__name__)


class RankDiedError(RuntimeError):
    """A rank is gone, so no step can be computed any more."""


class Failure(NamedTuple):
    """Why a rank ended. Without a subject it is no error of a user's."""

    rank: int
    subject: str
    problem: str
    remedy: str

    def as_error(self) -> Exception:
        if self.subject:
            return InputError(f"rank {self.rank}: {self.subject}", self.problem, self.remedy)
        return RankDiedError(f"rank {self.rank} died: {self.problem}")


class RankHandle(Protocol):
    """What runs a rank: a process, or an actor that holds one."""

    def describe_end(self) -> str:
        """Why it is gone, in words; waits a moment for that."""
        ...

    def end(self) -> None:
        """Let it end, by force if it must be."""
        ...


class RankLink:
    """A connected rank."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        handle: RankHandle,
        on_death: Callable[[Failure], None],
    ) -> None:
        """`on_death` is called from a thread of the link, unless the link was closed before."""
        self.rank, self._connection, self._handle = rank, connection, handle
        self._on_death = on_death
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._begun: dict[int, Future] = {}
        self._is_closing = False
        self._end: Exception | None = None  # what begun calls fail with from then on
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        threading.Thread(target=self._read, name=f"rank {rank}", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Send the frame of a call, from any thread. A rank that is gone is told of by
        `on_death`.
        """
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError:
            logger.debug("Rank %d is gone; its reader says why", self.rank)

    def begin(self, name: str, *values: Any) -> Future:
        """Let a thread of the rank do something, beside later calls. Callable from any thread."""
        number, future = next(self._numbers), Future()
        self._begun[number] = future
        self.send(call(BEGIN, number, name, *values))
        if self._end is not None:
            self._give_up()
        return future

    def reply(self) -> Any:
        """Wait for the next reply. None: the rank is gone."""
        return self._replies.get()

    def close(self) -> None:
        """Let the rank end."""
        self._is_closing = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("Rank %d was gone already", self.rank)
        self._connection.close()

    def wait(self) -> None:
        """Until it has ended, by force if it must be."""
        self._handle.end()

    def _read(self) -> None:
        failure = None
        try:
            while failure is None:
                name, *values = unpack(frames.receive(self._connection))
                if name == FAILED:
                    failure = Failure(self.rank, *values)
                elif name == DONE:
                    self._begun.pop(values[0]).set_result(values[1])
                elif name == REFUSED:
                    number, subject, *why = values
                    who = f"rank {self.rank}: {subject}" if subject else f"rank {self.rank}"
                    self._begun.pop(number).set_exception(InputError(who, *why))
                else:
                    self._replies.put(values)
        except (EOFError, OSError):
            if not self._is_closing:
                failure = Failure(self.rank, "", self._handle.describe_end(), "")
        if failure is not None and not self._is_closing:
            self._on_death(failure)
        else:
            failure = Failure(self.rank, "", "it was closed", "")
        self._end = failure.as_error()
        self._replies.put(None)
        self._give_up()

    def _give_up(self) -> None:
        """Let nobody wait for what a rank that is gone had begun."""
        for number in list(self._begun):
            future = self._begun.pop(number, None)
            if future is not None:
                future.set_exception(self._end)


def call(name: str, *values: Any) -> bytes:
    """The frame of a call."""
    return frames.frame(pack((name, *values)))
