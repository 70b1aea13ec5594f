"""Fixtures for tests of engines that exchange KV pages."""

from tests.qserve.kv_transfer.test_engines import make_engine, memory_connector  # noqa: F401
