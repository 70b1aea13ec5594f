"""Steps that Ctrl-C does not break off: the signal's handler runs when the step has ended.

An exception in the middle of a step would leave requests in a state that is not known, and the
other ranks waiting for this one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpone Python's handlers of SIGINT and SIGTERM to the end of the block.

    A second signal is handled immediately, in case the block never ends. Outside of the main
    thread, where no handler runs, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    handlers = {each: handler for each, handler in handlers.items() if callable(handler)}
    received: list[tuple[int, FrameType | None]] = []

    def postpone(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) > 1:
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, postpone)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(received) == 1:
            number, frame = received[0]
            handlers[number](number, frame)
