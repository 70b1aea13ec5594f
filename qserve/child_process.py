"""Starts a module of ours as a process with a socket to it. Knows no messages."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path


async def start_child(
    module: str, *arguments: str
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Run `python -m module --fd=N ...`, N a connected Unix socket; the other end is returned."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Without -P a folder named formats/ where the user stands would hide our own.
                "-P",
                "-m",
                module,
                f"--fd={theirs.fileno()}",
                *arguments,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                # Ctrl-C in the terminal goes to the server, which ends the others in good order.
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
            )
    except BaseException:
        writer.close()
        raise
    return process, reader, writer


def start_child_blocking(module: str, *arguments: str) -> tuple[subprocess.Popen, socket.socket]:
    """`start_child` for who has no event loop."""
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


def _environment() -> dict[str, str]:
    """This process's environment, with which the child imports the same packages as we do."""
    home = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{path}" if path else home}
