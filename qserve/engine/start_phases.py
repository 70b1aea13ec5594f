"""Phases of the start, of sleep and of updates: each logs how long it took."""

import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Log "NAME took 1.23 s" when the block has ended without an error."""
    started = time.perf_counter()
    yield
    logger.info("%s took %.2f s", name, time.perf_counter() - started)
