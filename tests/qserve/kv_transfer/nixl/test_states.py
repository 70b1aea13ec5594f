"""Engines of models with states exchange pages and states through the connector `nixl`."""

import socket

import pytest

from qserve.engine.kv_cache import state_snapshots
from qserve.kv_transfer.peer import peers
from tests.qserve.kv_transfer.nixl.conftest import needs_nixl
from tests.qserve.kv_transfer.peer.test_engines import AWAITS, ONE, run
from tests.qserve.kv_transfer.peer.test_states import PROMPT, make, small  # noqa: F401
from tests.qserve.kv_transfer.peer.test_tensor_parallel import exchange_between_one_rank_and_two
from tests.qserve.kv_transfer.test_states import cold  # noqa: F401


def test_decoded_tokens_equal_one_engine(agent, make, cold):  # noqa: F811
    prefill, decode = make("kv_producer"), make("kv_consumer")
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == cold("qwen3_5", PROMPT) and cached == [40]


def test_addresses_of_settings_find_states(agent, make, cold, tmp_path, monkeypatch):  # noqa: F811
    """The port for states follows the ports for pages."""
    monkeypatch.setattr(peers, "SCAN_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    extra = {"peers": [f"127.0.0.1:{port}"]}
    decode = make("kv_consumer", extra=extra)
    extra |= {"port": port, "path": str(tmp_path / "other")}
    prefill = make("kv_both", extra=extra)
    servers = [
        each._index._server.address[1]
        for each in (prefill.runner.senders.pages, prefill.runner.senders.states)
    ]
    assert servers == [port, port + 1]
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == cold("qwen3_5", PROMPT) and cached == [40]


def test_lost_connection_for_states_is_recomputed(agent, make, cold, monkeypatch):  # noqa: F811
    monkeypatch.setattr(peers, "SCAN_SECONDS", 0.01)
    prefill, decode = make("kv_producer"), make("kv_consumer", extra={"patience_s": 1000})
    sender = prefill.runner.senders.states
    monkeypatch.setattr(sender, "_send", lambda *_: sender._index._server.close())
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == cold("qwen3_5", PROMPT) and cached == [0]


@needs_nixl
@pytest.mark.exhaustive
def test_states_are_divided(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    exchange_between_one_rank_and_two("nixl", "cpu", tiny_model("qwen3_5"), tmp_path)
