"""Phases of startup, sleep and weight updates. Each phase logs its duration."""

import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Context that logs "NAME took 1.23 s" if it ends without an error."""
    started = time.perf_counter()
    yield
    logger.info("%s took %.2f s", name, time.perf_counter() - started)
