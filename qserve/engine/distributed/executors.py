"""ProcessExecutor: starts the other ranks of a model as processes on this machine."""

import logging
import shutil
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from qserve.config import EngineConfig
from qserve.engine.distributed.rank_channel import Failure, RankChannel, call
from qserve.processes import logs
from qserve.processes.child_process import start_child_blocking, stop_blocking

MODULE = "qserve.engine.distributed.rank_process"
BACKEND = "mp"  # --distributed-executor-backend
KILLED = -signal.SIGKILL
END_SECONDS = 5.0  # time for a process to exit before it is killed

OnDeath = Callable[[Failure], None]


class ProcessHandle:
    """A rank that is a child process."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def describe_end(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        why = "probably killed because memory ran out" if code == KILLED else "see its log"
        return f"its process ended with code {code}; {why}"

    def end(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def print_stacks(self) -> None:
        self._process.send_signal(signal.SIGUSR1)  # faulthandler answers it in rank_process.py


class WaitingRanks:
    """Processes of ranks 1 and up, started early; they import modules until an executor calls.

    Imports take seconds, so the ranks start before the leader imports the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._processes = [
            start_child_blocking(MODULE, f"--rank={rank}", f"--log-level={log_level()}")
            for rank in range(1, config.num_ranks)
        ]
        self._end = weakref.finalize(self, _end_all, self._processes)

    @classmethod
    def of(cls, config: EngineConfig) -> "WaitingRanks | None":
        """Start the other ranks. Returns None if the leader is the only process of this machine."""
        is_here = config.num_ranks > 1 and config.distributed_executor_backend == BACKEND
        return cls(config) if is_here else None

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process, _ in self._processes]

    def take(self) -> list[tuple[subprocess.Popen, socket.socket]]:
        """Return processes and connections in rank order. The caller must end the processes."""
        self._end.detach()
        return self._processes

    def close(self) -> None:
        """End the processes, unless `take` has returned them."""
        self._end()


class ProcessExecutor:
    """Runs ranks as processes on this machine. The rendezvous file is readable by the user only."""

    def __init__(
        self, config: EngineConfig, max_model_len: int, waiting: WaitingRanks | None = None
    ) -> None:
        """`waiting`: processes that are already running; None: `start` starts them."""
        self._config, self._max_model_len, self._waiting = config, max_model_len, waiting
        self._folder = tempfile.mkdtemp(prefix="qserve-ranks-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Rendezvous address of the ranks."""
        return f"file://{Path(self._folder) / 'store'}"

    @property
    def leader_index(self) -> int:
        """Index of the leader's device on its machine."""
        return 0

    @property
    def num_here(self) -> int:
        """Number of devices that the leader's machine must have."""
        return self._config.num_ranks

    def start(self, on_death: OnDeath) -> list[RankChannel]:
        """Send ranks 1 and up their first call. Returns the channels to them."""
        links, waiting = [], self._waiting or WaitingRanks(self._config)
        for rank, (process, connection) in enumerate(waiting.take(), 1):
            link = RankChannel(rank, connection, ProcessHandle(process), on_death)
            first = (self._config, self._max_model_len, rank, rank, self.num_here, self.address)
            link.send(call("start", *first))
            links.append(link)
        return links

    def end(self) -> None:
        """Remove the rendezvous file. Call only after the ranks have ended.

        A thread of NCCL's process group polls the store. If the file is deleted, the poll blocks
        that thread, and so the exit of the process, until the store's timeout of 30 minutes.
        """
        self._remove()


def _end_all(processes: list[tuple[subprocess.Popen, socket.socket]]) -> None:
    """End rank processes that no leader has called."""
    for _, connection in processes:
        connection.close()
    for process, _ in processes:
        stop_blocking(process, END_SECONDS)


def log_level() -> str:
    """Return the leader's log level, which the other ranks use too."""
    level = logging.getLevelName(logging.getLogger("qserve").getEffectiveLevel()).lower()
    return level if level in logs.LEVELS else "warning"
