"""RankChannel: the leader's connection to one other rank, for calls and replies.

A frame holds a tuple of a name and values. The rank replies only to calls that request a reply.
A long call is started with `begin`: a thread of the rank runs it while later calls run, and its
reply carries the number of the call.

Encoding: the length of a JSON tree, the tree, then the arrays that the tree refers to, each aligned
to 8 bytes. Dataclasses are encoded by name, and only those in KNOWN are decoded. Nothing is
pickled, so bytes from the network never run code.
"""

import itertools
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.kv_cache.host_tier import PageMoves
from qserve.engine.kv_cache.state_snapshots import StateMoves
from qserve.engine.step.draft_rows import DraftRows
from qserve.engine.step.media_rows import MediaRows
from qserve.engine.step.step_input import HistoryFill, PoolRows, PromptRows, StepInput
from qserve.multimodal.media import Feature, MediaItem
from qserve.processes import frames

KNOWN = {
    each.__name__: each
    for each in (
        StepInput,
        HistoryFill,
        PromptRows,
        PoolRows,
        DraftRows,
        PageMoves,
        StateMoves,
        MediaRows,
        MediaItem,
        Feature,
        EngineConfig,
    )
}
FIELDS = {each: tuple(field.name for field in fields(each)) for each in KNOWN.values()}
ALIGNMENT = 8
HEADER = 4


def pack(value: Any) -> bytes:
    """Encode numbers, strings, bytes, None, sequences, arrays and the dataclasses in KNOWN."""
    arrays: list[np.ndarray] = []
    tree = json.dumps(_tree(value, arrays), separators=(",", ":")).encode()
    parts = [len(tree).to_bytes(HEADER, "little"), tree, bytes(-(HEADER + len(tree)) % ALIGNMENT)]
    for array in arrays:
        parts += (array.tobytes(), bytes(-array.nbytes % ALIGNMENT))
    return b"".join(parts)


def unpack(data: bytes) -> Any:
    """Decode the bytes that `pack` made. Sequences become tuples."""
    buffer = bytearray(data)  # torch requires writable arrays
    length = int.from_bytes(buffer[:HEADER], "little")
    tree = json.loads(buffer[HEADER : HEADER + length])
    arrays = _array_reader(buffer, HEADER + length)
    next(arrays)
    return _value(tree, arrays)


def _tree(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": value.dtype.str, "shape": value.shape}
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(value)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_tree(each, arrays) for each in value]
    names = FIELDS.get(type(value))
    if names is None:
        raise TypeError(f"{type(value).__name__} is not in KNOWN of {__name__}")
    return {
        "class": type(value).__name__,
        "fields": [_tree(getattr(value, name), arrays) for name in names],
    }


def _array_reader(buffer: bytearray, start: int) -> Iterator[np.ndarray]:
    """Generator that receives (dtype, shape) by `send` and yields the next array."""
    array: np.ndarray | None = None
    while True:
        dtype, shape = yield array
        start += -start % ALIGNMENT
        count = int(np.prod(shape))
        array = np.frombuffer(buffer, dtype, count, start).reshape(shape)
        start += array.nbytes


def _value(tree: Any, arrays: Iterator[np.ndarray]) -> Any:
    if isinstance(tree, list):
        return tuple(_value(each, arrays) for each in tree)
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays.send((np.dtype(tree["array"]), tree["shape"]))
    if "bytes" in tree:
        return arrays.send((np.dtype(np.uint8), (tree["bytes"],))).tobytes()
    made = KNOWN[tree["class"]]
    values = [_value(each, arrays) for each in tree["fields"]]
    return made(**dict(zip(FIELDS[made], values, strict=True)))


SEND_BUFFER_BYTES = 4 * 2**20  # large enough that `send` does not block while a rank computes
FAILED = "failed"  # reply: subject, problem and remedy of the error that ended the rank
BEGIN = "begin"  # call: a number, then name and values of the call that a thread runs
DONE = "done"  # reply: the number, the result
REFUSED = "refused"  # reply: the number, then subject, problem and remedy of the error

logger = logging.getLogger(__name__)


class RankDiedError(RuntimeError):
    """A rank has died, so no further step can be computed."""


class Failure(NamedTuple):
    """The reason why a rank ended. The subject is empty if this is not a user error."""

    rank: int
    subject: str
    problem: str
    remedy: str

    def as_error(self) -> Exception:
        if self.subject:
            return InputError(f"rank {self.rank}: {self.subject}", self.problem, self.remedy)
        return RankDiedError(f"rank {self.rank} died: {self.problem}")


class RankHandle(Protocol):
    """The process of a rank, or the Ray actor that holds it."""

    def describe_end(self) -> str:
        """Return why the process ended. May wait a few seconds for the end."""
        ...

    def end(self) -> None:
        """End the process, by force if necessary."""
        ...

    def print_stacks(self) -> None:
        """Make the process print the stack of each of its threads to stderr, if it can."""
        ...


class RankChannel:
    """A connected rank."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        handle: RankHandle,
        on_death: Callable[[Failure], None],
    ) -> None:
        """`on_death` is called from the channel's thread, but not after `close`."""
        self.rank, self._connection, self._handle = rank, connection, handle
        self._on_death = on_death
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._begun: dict[int, Future] = {}
        self._is_closing = False
        self._end: Exception | None = None  # error for calls that are pending when the rank ends
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        threading.Thread(target=self._read, name=f"rank {rank}", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Send the frame of a call. Thread-safe. A dead rank is reported through `on_death`."""
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError:
            logger.debug("Rank %d has died; its reader reports the reason", self.rank)

    def begin(self, name: str, *values: Any) -> Future:
        """Start a call in a thread of the rank, in parallel with later calls. Thread-safe."""
        number, future = next(self._numbers), Future()
        self._begun[number] = future
        self.send(call(BEGIN, number, name, *values))
        if self._end is not None:
            self._give_up()
        return future

    def reply(self) -> Any:
        """Wait for the next reply. Returns None if the rank is gone."""
        return self._replies.get()

    def close(self) -> None:
        """Close the connection. The rank then ends."""
        self._is_closing = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("Rank %d has already ended", self.rank)
        self._connection.close()

    def print_stacks(self) -> None:
        """Make the rank print the stacks of its threads."""
        self._handle.print_stacks()

    def wait(self) -> None:
        """Wait until the rank has ended; end it by force if necessary."""
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
        """Fail the pending calls of a rank that is gone."""
        for number in list(self._begun):
            future = self._begun.pop(number, None)
            if future is not None:
                future.set_exception(self._end)


def call(name: str, *values: Any) -> bytes:
    """Return the frame of a call."""
    return frames.frame(pack((name, *values)))
