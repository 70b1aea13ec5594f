"""Engines that exchange pages by the connector `nixl`."""

import importlib.util

import pytest

from qserve.kv_transfer.nixl import link
from tests.qserve.kv_transfer.nixl.agents import InProcessAgent
from tests.qserve.kv_transfer.peer.test_engines import cold, make_engine  # noqa: F401

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="needs the package nixl"
)


@pytest.fixture(params=["in process", pytest.param("nixl", marks=needs_nixl)])
def agent(request, monkeypatch):
    """Run a test without NIXL and, where the package is installed, with it."""
    if request.param == "in process":
        monkeypatch.setattr(link, "NixlAgent", InProcessAgent)
    return request.param


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(link, "NixlAgent", InProcessAgent)


@pytest.fixture
def connector():
    return "nixl"
