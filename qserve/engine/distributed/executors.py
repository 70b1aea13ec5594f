"""ProcessExecutor: starts the other ranks of a model as processes of this machine."""

import logging
import shutil
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from qserve.config import EngineConfig
from qserve.engine.distributed.rank_channel import Failure, RankChannel, call
from qserve.processes import logs
from qserve.processes.child_process import start_child_blocking

MODULE = "qserve.engine.distributed.rank_process"
KILLED = -signal.SIGKILL
END_SECONDS = 5.0  # that a process has to exit on its own

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


class ProcessExecutor:
    """Ranks as processes of this machine; they rendezvous at a file only this user can read."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        self._config, self._max_model_len = config, max_model_len
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
        """Devices that the leader's machine must have."""
        return self._config.num_ranks

    def start(self, on_death: OnDeath) -> list[RankChannel]:
        """Start ranks 1 and up, and send each its first call."""
        links = []
        for rank in range(1, self.num_here):
            process, connection = start_child_blocking(
                MODULE, f"--rank={rank}", f"--log-level={log_level()}"
            )
            link = RankChannel(rank, connection, ProcessHandle(process), on_death)
            first = (self._config, self._max_model_len, rank, rank, self.num_here, self.address)
            link.send(call("start", *first))
            links.append(link)
        return links

    def end(self) -> None:
        """Remove the rendezvous file. Call only after the ranks have ended.

        A thread of NCCL's process group polls the store. Polling a deleted file blocks it, and with
        it the exit of the process, for the 30 minutes of the store's timeout.
        """
        self._remove()


def log_level() -> str:
    """Log level of the leader; the other ranks use the same."""
    level = logging.getLevelName(logging.getLogger("qserve").getEffectiveLevel()).lower()
    return level if level in logs.LEVELS else "warning"
