"""Ctrl-C where Python is still importing: end at once. Loads no torch.

Extension modules drop a KeyboardInterrupt that comes while they are imported, or make another error
of it: the program would run on, or end with a traceback of somebody else's code.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code, as shells have it
IMPORT_SYSTEM = "<frozen importlib"


@contextmanager
def end_while_importing() -> Iterator[None]:
    """Let SIGINT end the process during an import; anywhere else it raises, as it always does."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    inner = frame
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    signal.default_int_handler(number, inner)
