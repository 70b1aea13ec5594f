"""LogLimit: lines that a client can cause do not fill the disk. Knows no loggers by name."""

import logging
import re
import threading
import time

WINDOW_SECONDS = 10.0
LINES = 10  # of one kind in a window
KINDS = 1000  # kept at once: a message's template is a kind, and a program has few
NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")


class LogLimit(logging.Filter):
    """Lets LINES lines of each kind through in WINDOW_SECONDS; the next one says how many were not.

    Lines of one kind come from one place: logger and template of the message are the same, but for
    numbers and addresses that somebody put into the template.
    """

    def __init__(self, lines: int = LINES, seconds: float = WINDOW_SECONDS) -> None:
        super().__init__()
        self._lines, self._seconds = lines, seconds
        self._lock = threading.Lock()
        self._kinds: dict[tuple, list] = {}  # kind: [start of its window, lines, those left out]

    def filter(self, record: logging.LogRecord) -> bool:
        template = NUMBER.sub("#", str(record.msg)[:200])
        kind, now = (record.name, record.levelno, template), time.monotonic()
        with self._lock:
            if len(self._kinds) > KINDS:
                self._kinds.clear()
            state = self._kinds.setdefault(kind, [now, 0, 0])
            if now - state[0] >= self._seconds:
                num_left_out, state[:] = state[2], [now, 0, 0]
                if num_left_out:
                    record.msg = f"{record.msg} (and {num_left_out} more such lines before)"
            state[1] += 1
            state[2] += state[1] > self._lines
            return state[1] <= self._lines


def limit_logging() -> None:
    """Put the limit on every handler of the root logger; without any, make one for warnings."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="%(message)s")
    for handler in root.handlers:
        if not any(isinstance(each, LogLimit) for each in handler.filters):
            handler.addFilter(LogLimit())
