"""AdapterLoads: reads adapters that clients load, in threads, while steps run."""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock

from formats.errors import InputError, one_line
from qserve.engine.ipc.messages import LoadAdapter

NUM_THREADS = 2  # so that one folder on a slow disk does not block the other loads

Read = Callable[[str, Callable[[], bool]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRead:
    """Result of reading an adapter: its tensors or an error message."""

    command: LoadAdapter
    packed: object = None
    problem: str = ""


class AdapterLoads:
    """Queue of pending loads, in order of arrival. Thread-safe."""

    def __init__(
        self,
        start_thread: Callable[[Callable[[], None]], None],
        done: Callable[[AdapterRead], None],
    ) -> None:
        """`start_thread` runs a function in a thread. That thread calls `done` with each result."""
        self._start_thread, self._done = start_thread, done
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = Lock()
        self._num_threads = 0
        self._cancelled: dict[int, Event] = {}  # number of an unfinished load -> set to cancel it

    def add(self, command: LoadAdapter, read: Read) -> None:
        """Queue an adapter to be read."""
        with self._lock:
            self._cancelled[command.number] = Event()
            starts = self._num_threads < min(NUM_THREADS, len(self._cancelled))
            self._num_threads += starts
        self._waiting.put((command, read))
        if starts:
            self._start_thread(self._work)

    def cancel(self, number: int) -> None:
        """Cancel a load whose client has disconnected. An unknown number is ignored."""
        with self._lock:
            cancelled = self._cancelled.get(number)
        if cancelled is not None:
            cancelled.set()

    def _work(self) -> None:
        while True:
            command, read = self._waiting.get()
            self._done(self._read(command, read))

    def _read(self, command: LoadAdapter, read: Read) -> AdapterRead:
        cancelled = self._cancelled[command.number]
        try:
            if cancelled.is_set():
                raise InputError(
                    command.lora.lora_path,
                    "was not read: the request was cancelled",
                    "send the request again",
                )
            packed = read(command.lora.lora_path, lambda: not cancelled.is_set())
            return AdapterRead(command=command, packed=packed)
        except (InputError, OSError) as error:
            return AdapterRead(command=command, problem=str(error))
        except Exception as error:  # any error concerns only this adapter
            problem = f"cannot be read: {type(error).__name__}: {one_line(error)}"
            return AdapterRead(command=command, problem=f"{command.lora.lora_path}: {problem}")
        finally:
            with self._lock:
                del self._cancelled[command.number]
