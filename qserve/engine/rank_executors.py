"""Starts the other ranks of a model as processes of this machine."""

import logging
import shutil
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from qserve import logs
from qserve.child_process import start_child_blocking
from qserve.config import EngineConfig
from qserve.engine.rank_link import Failure, RankLink, call

MODULE = "qserve.engine.rank_process"
KILLED = -signal.SIGKILL
END_SECONDS = 5.0  # that a process has to end by itself

OnDeath = Callable[[Failure], None]


class ProcessHandle:
    """A rank that is a process of ours."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def describe_end(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        why = "the system does that where memory runs out" if code == KILLED else "see its log"
        return f"its process ended with code {code}; {why}"

    def end(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ProcessExecutor:
    """Ranks as processes of this machine, that meet at a file only this user can read."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        self._config, self._max_model_len = config, max_model_len
        self._folder = tempfile.mkdtemp(prefix="qserve-ranks-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Where all ranks meet."""
        return f"file://{Path(self._folder) / 'store'}"

    @property
    def leader_index(self) -> int:
        """The number of the leader's device on its machine."""
        return 0

    @property
    def num_here(self) -> int:
        """Devices that the leader's machine must have."""
        return self._config.num_ranks

    def start(self, on_death: OnDeath) -> list[RankLink]:
        """Start ranks 1 and up, and send each its first call."""
        links = []
        for rank in range(1, self.num_here):
            process, connection = start_child_blocking(
                MODULE, f"--rank={rank}", f"--log-level={log_level()}"
            )
            link = RankLink(rank, connection, ProcessHandle(process), on_death)
            first = (self._config, self._max_model_len, rank, rank, self.num_here, self.address)
            link.send(call("start", *first))
            links.append(link)
        return links

    def met(self) -> None:
        """All ranks have met: the place is not needed any more."""
        self._remove()

    def end(self) -> Callable[[], None]:
        """What is left to do once the ranks have ended."""
        return self._remove


def log_level() -> str:
    """Of the leader's lines: the other ranks write theirs from the same on."""
    level = logging.getLevelName(logging.getLogger("qserve").getEffectiveLevel()).lower()
    return level if level in logs.LEVELS else "warning"
