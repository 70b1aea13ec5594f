"""LogLimit: limits the rate of log lines, so that clients cannot fill the disk with them."""

import logging
import re
import threading
import time

WINDOW_SECONDS = 10.0
LINES = 10  # of one kind within the window
KINDS = 1000  # maximum number of kinds to track; a kind is a message template
NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")


class LogLimit(logging.Filter):
    """Pass LINES lines of each kind per WINDOW_SECONDS. The next one reports how many were dropped.

    Lines are of one kind if logger, level and message template are equal, except for numbers and
    addresses in the template.
    """

    def __init__(self, lines: int = LINES, seconds: float = WINDOW_SECONDS) -> None:
        super().__init__()
        self._lines, self._seconds = lines, seconds
        self._lock = threading.Lock()
        self._kinds: dict[tuple, list] = {}  # kind -> [start of its window, lines, dropped lines]

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
    """Add the limit to all handlers of the root logger. If it has none, create one for warnings."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="%(message)s")
    for handler in root.handlers:
        if not any(isinstance(each, LogLimit) for each in handler.filters):
            handler.addFilter(LogLimit())
