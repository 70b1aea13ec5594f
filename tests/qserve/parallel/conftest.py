"""Fixtures for tests of ranks: quantized tiny models, and engines that end with their test."""

import pytest

from tests.qserve.model.conftest import written  # noqa: F401
from tests.qserve.parallel.engines import start


@pytest.fixture
def many():
    """start, and the end of what was started."""
    started = []

    def make(*args, **settings):
        started.append(start(*args, **settings))
        return started[-1]

    yield make
    for llm in started:
        llm.close()
