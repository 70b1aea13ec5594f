"""Start a module of this package as a child process, connected by a socket."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

POLL_SECONDS = 0.02  # interval of the checks whether a process has ended


async def start_child(
    module: str, *arguments: str
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Run `python -m module --fd=N ...`, N being a Unix socket. Returns the process and our end."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Without -P, a folder named formats/ in the working directory would shadow the
                # package.
                "-P",
                "-m",
                module,
                f"--fd={theirs.fileno()}",
                *arguments,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                # A new session, so that Ctrl-C in the terminal reaches only the server, which stops
                # the other processes in order.
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
            )
    except BaseException:
        writer.close()
        raise
    return process, reader, writer


def start_child_blocking(module: str, *arguments: str) -> tuple[subprocess.Popen, socket.socket]:
    """`start_child` for callers without an event loop."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, f"--fd={theirs.fileno()}", *arguments],
            pass_fds=(theirs.fileno(),),
            env=_environment(),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
    return process, ours


class StartedProcess:
    """A child process that was started without an event loop, for a caller with one.

    Members are those of asyncio.subprocess.Process.
    """

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.pid = process.pid
        self.terminate, self.kill = process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(POLL_SECONDS)
        return code


ChildProcess = asyncio.subprocess.Process | StartedProcess


def stop_blocking(process: subprocess.Popen, seconds: float) -> None:
    """End a process with SIGTERM, and with SIGKILL if it still runs after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return an environment in which the child imports the same packages as this process."""
    home = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{path}" if path else home}
