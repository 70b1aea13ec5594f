"""Engines that exchange pages by the connector `nixl`."""

import importlib.util
import json

import pytest

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.kv_transfer.nixl import link
from tests.qserve.kv_transfer.nixl.agents import InProcessAgent
from tests.qserve.kv_transfer.peer.test_engines import PAGE, cold  # noqa: F401

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
def make_engine(docs_5m, tmp_path):
    made = []

    def make(role, *, model=docs_5m, extra=(), **settings):
        transfer = {
            "kv_connector": "nixl",
            "kv_role": role,
            "kv_connector_extra_config": {"path": str(tmp_path / "peers"), **dict(extra)},
        }
        settings = {"num_gpu_blocks_override": 100, "max_num_seqs": 4} | settings
        settings = {"max_num_batched_tokens": 64, "block_size": PAGE, "device": "cpu"} | settings
        config = EngineConfig(model=str(model), kv_transfer_config=json.dumps(transfer), **settings)
        made.append(Engine(config))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
