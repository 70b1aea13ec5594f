"""End the process immediately on Ctrl-C during Python imports. Loads no torch.

Some extension modules swallow a KeyboardInterrupt during their import, or turn it into another
error. The program would then continue, or end with a confusing traceback.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit code, as in shells
IMPORT_SYSTEM = "<frozen importlib"


@contextmanager
def end_while_importing() -> Iterator[None]:
    """Make SIGINT end the process during an import, and raise KeyboardInterrupt otherwise."""
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
