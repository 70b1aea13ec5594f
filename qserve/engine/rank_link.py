"""The leader's line to one other rank: calls go there, replies come back. Knows no tensors.

Calls and replies are tuples of a name and values (packing.py) in frames. A call is not answered
unless the leader asks for a reply.
"""

import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from formats.errors import InputError
from qserve import frames
from qserve.engine.packing import pack, unpack

SEND_BUFFER_BYTES = 4 * 2**20  # a long step is not held up by a rank that still computes the last
FAILED = "failed"  # a reply: subject, problem, remedy of what ended the rank

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
        self._is_closing = False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        threading.Thread(target=self._read, name=f"rank {rank}", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Send the frame of a call. A rank that is gone is told of by `on_death`."""
        try:
            self._connection.sendall(frame)
        except OSError:
            logger.debug("Rank %d is gone; its reader says why", self.rank)

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
                else:
                    self._replies.put(values)
        except (EOFError, OSError):
            if not self._is_closing:
                failure = Failure(self.rank, "", self._handle.describe_end(), "")
        if failure is not None and not self._is_closing:
            self._on_death(failure)
        self._replies.put(None)


def call(name: str, *values: Any) -> bytes:
    """The frame of a call."""
    return frames.frame(pack((name, *values)))
