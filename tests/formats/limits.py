"""How long a test may compute, in CPU time: another process may have the core meanwhile."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def cpu_seconds(most: float) -> Iterator[None]:
    """Fails the block, and ends it, once this process has computed for so long."""

    def stop(*_: object) -> None:
        raise AssertionError(f"it computed for {most} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
