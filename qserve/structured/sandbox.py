"""SandboxCompiler: compiles grammars in a separate process with limits on memory and time."""

import contextlib
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from formats.errors import InputError
from qserve.errors import BusyError, ParameterError
from qserve.processes import frames
from qserve.processes.child_process import start_child_blocking
from qserve.structured import sandbox_messages
from qserve.structured.grammar import refusal
from qserve.structured.params import FIELD, StructuredOutputsParams
from qserve.structured.sandbox_messages import Begun, Compiled, GrammarRefused, Setup

# Limits of one grammar. A schema with 3000 properties takes 2.5 s and 13 MiB.
MAX_CPU_SECONDS = 4.0
MAX_WORK_BYTES = 128 * 2**20  # memory during compilation
MAX_COMPILED_BYTES = 64 * 2**20  # size of the compiled grammar
# Wall-clock limits, in case the machine is busy or the process is stopped.
MAX_WALL_SECONDS = 40.0
MAX_START_SECONDS = 60.0
POLL_SECONDS = 0.1  # interval of the check whether a request still waits


class CompileCancelled(Exception):
    """The compilation was cancelled: no request waits for its result."""


class SandboxCompiler:
    """Controls the sandbox process for one model's vocabulary. The process starts on first use."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder, self._vocab_size, self._eos_token_ids = folder, vocab_size, eos_token_ids
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._is_closed = False

    def compile(self, params: StructuredOutputsParams, is_wanted: Callable[[], bool]) -> Compiled:
        """Compile a grammar within the limits. Thread-safe; blocks.

        Raises ParameterError if the grammar cannot be used, BusyError if the process gives no
        result, CompileCancelled once `is_wanted` returns False.
        """
        for _ in range(2):  # the process may have been killed since the last grammar
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    process = self._hand_over(theirs)
                started = time.monotonic()
                if process is None:
                    continue
                last = self._exchange(ours, params, is_wanted)
            if last is not None and not isinstance(last, Begun):
                return _verdict(params, last)
            if time.monotonic() - started > MAX_WALL_SECONDS:
                self._replace(process)  # the process may be stopped by a signal
                break
            # If the sandbox process is alive, a limit ended the fork. A killed process closes its
            # sockets before `poll` reports its end.
            if last is not None and process.poll() is None:
                raise refusal(
                    params,
                    f"is too complex: compiling it takes more than {MAX_CPU_SECONDS:g} s"
                    f" or {MAX_WORK_BYTES >> 20} MiB",
                )
            self._replace(process)
        raise BusyError(FIELD, "the grammar could not be compiled in time", "try again later")

    def close(self) -> None:
        """Stop the process and its compilations. No grammar can be compiled afterwards."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _exchange(
        self,
        ours: socket.socket,
        params: StructuredOutputsParams,
        is_wanted: Callable[[], bool],
    ) -> Begun | Compiled | GrammarRefused | None:
        """Send the grammar and wait for the result. Returns the last message, None without any."""
        most = MAX_WALL_SECONDS + MAX_START_SECONDS
        deadline = time.monotonic() + most
        ours.settimeout(most)
        last = None
        arrived = select.poll()  # not select.select, which takes no descriptor above 1023
        arrived.register(ours, select.POLLIN)
        try:
            ours.sendall(frames.frame(sandbox_messages.encode(params)))
            while last is None or isinstance(last, Begun):
                while not arrived.poll(POLL_SECONDS * 1000):
                    if not is_wanted():
                        raise CompileCancelled
                    if time.monotonic() > deadline:
                        return last
                last = sandbox_messages.decode(
                    frames.receive(ours), Begun | Compiled | GrammarRefused
                )
        except (EOFError, OSError):
            pass
        return last

    def _hand_over(self, theirs: socket.socket) -> subprocess.Popen | None:
        """Pass a job's socket to the process. Returns the process.

        Returns None if the process is gone; the next call will start a new one.
        """
        with self._lock:
            if self._is_closed:
                raise CompileCancelled
            if self._process is None:
                self._start()
            try:
                socket.send_fds(self._connection, [b"j"], [theirs.fileno()])
            except OSError:
                self._end()
                return None
            return self._process

    def _start(self) -> None:
        path = Path(self._folder) / "tokenizer.json"
        setup = Setup(
            tokenizer_path=str(path),
            tokenizer="" if path.exists() else tokenizer_text(self._folder),
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            max_bytes=MAX_WORK_BYTES,
            cpu_seconds=MAX_CPU_SECONDS,
            wall_seconds=MAX_WALL_SECONDS,
        )
        self._process, self._connection = start_child_blocking("qserve.structured.sandbox_process")
        with contextlib.suppress(OSError):
            self._connection.sendall(frames.frame(sandbox_messages.encode(setup)))

    def _replace(self, process: subprocess.Popen) -> None:
        """Stop a process that no longer answers, unless another thread has done so."""
        with self._lock:
            if self._process is process:
                self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = self._connection = None


def tokenizer_text(folder: str) -> str:
    """Return the model's tokenizer in the format of tokenizer.json. Raises InputError."""
    path = Path(folder) / "tokenizer.json"
    if path.exists():
        return path.read_text(encoding="utf-8")
    from qserve.text.load_tokenizer import load_tokenizer  # imports the library tokenizers

    backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            FIELD,
            "requires a tokenizer of the library tokenizers (a tokenizer.json)",
            "save the tokenizer as tokenizer.json with transformers",
        )
    return backend.to_str()


def _verdict(params: StructuredOutputsParams, found: Compiled | GrammarRefused) -> Compiled:
    if isinstance(found, GrammarRefused):
        raise ParameterError(found.subject, found.problem, found.remedy)
    if found.num_bytes > MAX_COMPILED_BYTES:
        problem = f"is too complex: compiled, it takes {found.num_bytes >> 20} MiB"
        raise refusal(params, f"{problem}, more than {MAX_COMPILED_BYTES >> 20}")
    return found
