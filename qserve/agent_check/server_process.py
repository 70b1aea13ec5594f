"""Starts a server process for a model folder, and stops it after the check."""

import contextlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from formats.errors import InputError
from qserve.processes.child_process import stop_blocking

START_SECONDS = 900.0  # loading and warming up a large model takes minutes
STOP_SECONDS = 30.0
READY = re.compile(r"^Serving .* on (https?://\S+)$", re.MULTILINE)


@contextlib.contextmanager
def served(model: str, arguments: str) -> Iterator[str]:
    """Start a server on a free port, and yield its URL.

    If the server does not start, raises InputError with the last line of its output.
    """
    command = [sys.executable, "-m", "qserve", "serve", model, "--port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [*command, *shlex.split(arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        try:
            yield _url(process, log, model)
        finally:
            stop_blocking(process, STOP_SECONDS)


def _url(process: subprocess.Popen, log: Path, model: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if found := READY.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    raise InputError(
        model,
        f"the server did not start: {last or 'no output'}",
        "start it with `qserve serve` to see its log",
    )
