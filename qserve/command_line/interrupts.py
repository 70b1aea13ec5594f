"""End a command on SIGINT (Ctrl-C) and SIGTERM, without unfinished files. Loads no torch.

Both signals raise KeyboardInterrupt, so that writers remove or keep their files. During an import
they end the process immediately: some extension modules swallow a KeyboardInterrupt during their
import, or turn it into another error. The program would then continue, or end with a confusing
traceback.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from formats.files import staging

INTERRUPTED = 128 + signal.SIGINT  # exit code, as in shells
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
IMPORT_SYSTEM = "<frozen importlib"


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


@contextmanager
def handled(command: str) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and Terminated on SIGTERM; end the process in an import.

    `command`: how messages name the program. Signals that are ignored, or that the caller of `main`
    handles, keep their handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
                staging.remove_all()
                os.write(2, f"{_message(command, number)}\n".encode())
                os._exit(128 + number)
            frame = frame.f_back
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    defaults = (signal.default_int_handler, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in NAMES}
    ours = [number for number in NAMES if before[number] in defaults]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def outcome(command: str, error: KeyboardInterrupt) -> tuple[str, int]:
    """Return the message and the exit code of a command that a signal ended."""
    number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
    return _message(command, number), 128 + number


def _message(command: str, number: int) -> str:
    return f"{command}: ended by {NAMES[signal.Signals(number)]}"
