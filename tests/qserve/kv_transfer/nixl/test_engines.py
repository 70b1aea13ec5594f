"""Two engines, one of which computes prompts for the other, through the connector `nixl`."""

import json
import logging
import socket
import subprocess
import sys

import pytest

from formats.errors import InputError
from qserve.kv_transfer.nixl import agent as agents
from qserve.kv_transfer.nixl import remote
from qserve.kv_transfer.nixl.agent import NixlAgent, Region
from qserve.kv_transfer.nixl.finder import SUFFIX
from qserve.kv_transfer.nixl.page_server import Announcement, PageConnection, PageServer
from qserve.kv_transfer.peer import peers
from qserve.kv_transfer.peer.layout import BufferFacts
from qserve.kv_transfer.peer.memory import TransferError
from tests.qserve.kv_transfer.nixl.conftest import needs_nixl
from tests.qserve.kv_transfer.peer.test_engines import AWAITS, DYING, ONE, PROMPT, run
from tests.qserve.kv_transfer.peer.test_tensor_parallel import exchange_between_one_rank_and_two


def receiver(engine):
    return engine.workers._ours.transfers.peer.receiver


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_decoded_tokens_equal_one_engine(dtype, agent, make_engine, cold):
    prefill = make_engine("kv_producer", kv_cache_dtype=dtype)
    decode = make_engine("kv_consumer", kv_cache_dtype=dtype)
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == [cold(PROMPT, kv_cache_dtype=dtype)] and cached == [24]


def test_request_waits_for_remote_prompt_in_computation(agent, make_engine, cold):
    """The prompt takes several steps of the other engine, which begins after the wait."""
    prompts = [[n, *range(10, 90)] for n in range(3, 6)]
    prefill = make_engine("kv_producer", max_num_batched_tokens=32)
    decode = make_engine("kv_consumer")
    for index, prompt in enumerate(prompts):
        prefill.add_request(str(index), prompt, ONE)
    ran = []

    def compute():
        if decode._pending.num_waiting and prefill.has_work():
            ran.append(prefill.step())

    tokens, cached = run(decode, prompts, options=AWAITS, between=compute)
    assert len(ran) > 3
    assert tokens == [cold(prompt) for prompt in prompts] and cached == [80] * 3


def test_ring_buffer_wraps_around(in_process, make_engine, cold):
    """Pages lie at both ends of the ring, and so do the entries that a reader takes."""
    prefill = make_engine("kv_both", max_num_batched_tokens=36, max_num_seqs=1)
    decode = make_engine("kv_both")
    slots = prefill.workers._ours.transfers.peer.num_slots
    assert slots % 6, "the ring ends inside a prompt"
    for n in range(2 * slots // 6 + 2):
        prompt = [100 + n, *PROMPT[1:]]
        run(prefill, [prompt], ONE)
        if n % 2:
            tokens, cached = run(decode, [prompt], options=AWAITS if n == 1 else None)
            assert tokens == [cold(prompt)] and cached == [24]
    tokens, cached = run(decode, [[100, *PROMPT[1:]]])
    assert cached == [0], "its pages were overwritten"


@pytest.mark.parametrize("size", [1, 5000])
def test_transfer_larger_than_staging_memory(size, in_process, make_engine, cold, monkeypatch):
    monkeypatch.setattr(remote, "STAGING_BYTES", size)
    prefill = make_engine("kv_producer", kv_cache_dtype="int8")
    decode = make_engine("kv_consumer", kv_cache_dtype="int8")
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == [cold(PROMPT, kv_cache_dtype="int8")] and cached == [24]


def test_pages_of_other_model_are_refused(agent, make_engine, cold, caplog):
    prefill = make_engine("kv_producer", block_size=8)
    run(prefill, [PROMPT], ONE)
    decode = make_engine("kv_consumer")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            tokens, cached = run(decode, [PROMPT], options=AWAITS)
            decode.reset_prefix_cache()
            assert tokens == [cold(PROMPT)] and cached == [0]
    (error,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert "block size: expected 4 tokens, found 8 tokens" in error


def test_slot_overwritten_during_copy_is_discarded(agent, make_engine, cold, monkeypatch):
    prefill, decode = make_engine("kv_producer"), make_engine("kv_consumer")
    run(prefill, [PROMPT], ONE)
    index, copy = prefill.runner.senders.pages._index, receiver(decode)._copy
    copied = []

    def overwritten(job, run, ready):
        copy(job, run, ready)
        copied.append(ready)
        index._begun[0] += index.facts.num_slots  # all slots were given to other pages

    monkeypatch.setattr(receiver(decode), "_copy", overwritten)
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == [cold(PROMPT)] and cached == [0] and copied


@pytest.mark.parametrize("at", [0, 1, 3])
def test_engine_exit_between_layers(at, agent, make_engine, cold, monkeypatch):
    """The request is computed immediately. The connection ends, as after a kill."""
    monkeypatch.setattr(peers, "SCAN_SECONDS", 0.01)
    prefill = make_engine("kv_producer")
    decode = make_engine("kv_consumer", extra={"patience_s": 1000})
    sender = prefill.runner.senders.pages
    send, gone = sender._send, []

    def goes(batch, cache):
        if batch.num_sent < at:
            send(batch, cache)
        elif batch.num_sent == at and not gone:
            sender._index._server.close()
            gone.append(at)
            batch.num_sent = 100

    monkeypatch.setattr(sender, "_send", goes)
    prefill.add_request("0", PROMPT, ONE)

    def compute():
        if decode._pending.num_waiting and prefill.has_work():
            prefill.step()

    tokens, cached = run(decode, [PROMPT], options=AWAITS, between=compute)
    assert gone and tokens == [cold(PROMPT)] and cached == [0]


@pytest.mark.parametrize("read", [0, 1, 2, 3])
def test_failed_read_is_recomputed(read, in_process, make_engine, cold, monkeypatch, caplog):
    """Reads of the table, its entries, the pages, and the table after the pages."""
    prefill = make_engine("kv_producer")
    decode = make_engine("kv_consumer", extra={"patience_s": 1000})
    run(prefill, [PROMPT], ONE)
    agent = decode.workers._ours.transfers.peer._link._agent
    copy, left = agent.read, [read]

    def fails(*values):
        if not left[0]:
            raise TransferError("the network is down")
        left[0] -= 1
        copy(*values)

    monkeypatch.setattr(agent, "read", fails)
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == [cold(PROMPT)] and cached == [0]
    assert "cannot be read (the network is down): its pages are computed here" in caplog.text


def test_addresses_of_settings_find_engines_without_a_common_folder(
    agent, make_engine, cold, tmp_path, monkeypatch
):
    """An engine that starts again at the address is found again. All know all addresses."""
    monkeypatch.setattr(peers, "SCAN_SECONDS", 0.01)
    (tmp_path / "secret").write_text("a secret of the two hosts")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"peers": [f"127.0.0.1:{port}"], "secret_file": str(tmp_path / "secret")}
    decode = make_engine("kv_consumer", extra=common)
    for prompt in (PROMPT, [7, *PROMPT]):
        extra = {**common, "port": port, "path": str(tmp_path / "other")}
        prefill = make_engine("kv_both", extra=extra)
        run(prefill, [prompt], ONE)
        tokens, cached = run(decode, [prompt], options=AWAITS)
        assert tokens == [cold(prompt)] and cached == [24]
        prefill.close()
        tokens, cached = run(decode, [[9, *prompt]], options=AWAITS)
        assert tokens == [cold([9, *prompt])] and cached == [0]


def test_wrong_secret_gets_no_pages(in_process, make_engine, cold, tmp_path, caplog):
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"the secret of engine {name}")
    prefill = make_engine("kv_producer", extra={"secret_file": str(tmp_path / "one")})
    run(prefill, [PROMPT], ONE)
    for extra in ({"secret_file": str(tmp_path / "two")}, {}):
        decode = make_engine("kv_consumer", extra=extra)
        tokens, cached = run(decode, [PROMPT], options=AWAITS)
        assert tokens == [cold(PROMPT)] and cached == [0]
    assert "its secret differs" in caplog.text


def test_reader_without_the_secret_learns_nothing():
    here = Region(address=1, kind="DRAM", device=0)
    facts = BufferFacts(
        engine="a",
        rank=0,
        num_ranks=1,
        model="m",
        digest="d",
        form={},
        tensors=[],
        num_slots=1,
        process=1,
        device="cpu",
    )
    announcement = Announcement(facts=facts, metadata=b"\0\xff", pages=here, table=here)
    server = PageServer(("127.0.0.1", 0), announcement, b"a secret")
    try:
        with socket.create_connection(server.address, 10) as reader:
            reader.sendall(bytes(64))
            with reader.makefile("rb") as found:
                assert len(found.read()) == 40, "the greeting alone"
        connection = PageConnection(server.address, b"a secret")
        assert connection.announcement == announcement and connection.is_alive
    finally:
        server.close()
    connection._socket.setblocking(True)
    assert not connection.is_alive
    connection.close()


def test_listener_that_is_not_an_engine_is_reported_once(in_process, make_engine, cold, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        decode = make_engine("kv_consumer", extra={"peers": [address]})
        reader, _ = server.accept()
        reader.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        reader.close()
        for _ in range(2):
            tokens, cached = run(decode, [PROMPT], options=AWAITS)
            decode.reset_prefix_cache()
            assert tokens == [cold(PROMPT)] and cached == [0]
    warnings = [each.getMessage() for each in caplog.records if address in each.getMessage()]
    assert len(warnings) == 1 and "is no engine that sends KV pages" in warnings[0]


def test_invalid_engine_files_are_ignored_or_removed(in_process, make_engine, cold, tmp_path):
    folder = tmp_path / "peers"
    prefill = make_engine("kv_producer")
    (made,) = folder.iterdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = json.loads(made.read_text()) | {"port": free.getsockname()[1]}
    (folder / f"dead.0{SUFFIX}").write_text(json.dumps(dead))
    (folder / f"bad.0{SUFFIX}").write_bytes(b"\xff{")
    elsewhere = dead | {"node": "another", "host": "localhost"}
    (folder / f"elsewhere.0{SUFFIX}").write_text(json.dumps(elsewhere))
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(make_engine("kv_consumer"), [PROMPT], options=AWAITS)
    assert tokens == [cold(PROMPT)] and cached == [24]
    left = {path.name for path in folder.iterdir()}
    assert left == {made.name, f"bad.0{SUFFIX}", f"elsewhere.0{SUFFIX}"}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"size": 3}, "unknown keys: size.*known keys: path.*peers"),
        ({"patience_s": 0}, "patience_s: expected a number above 0"),
        ({"port": "x"}, "port: expected 0 to 65535, found 'x'"),
        ({"port": True}, "port: expected 0 to 65535"),
        ({"peers": "host:1"}, "peers: expected a list"),
        ({"peers": ["host"]}, "peers: expected \"host:port\", found 'host'"),
        ({"peers": ["host:0"]}, "peers: expected"),
        ({"host": "0.0.0.0"}, "host: 0.0.0.0 needs secret_file"),
        ({"host": "127.0.0.1", "port": 1}, "host: 127.0.0.1:1 cannot be listened on"),
        ({"backend": 3}, "backend: expected a NIXL backend"),
        ({"secret_file": "/none"}, "secret_file: cannot be read"),
    ],
)
def test_wrong_settings_are_refused(extra, message, in_process, make_engine):
    if extra.get("port") == 1 and "host" in extra:  # root may listen there
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            message = message.replace(":1 ", f":{port} ")
            with pytest.raises(InputError, match=message):
                make_engine("kv_both", extra={**extra, "port": port})
        return
    with pytest.raises(InputError, match=message):
        make_engine("kv_both", extra=extra)


def test_missing_package_is_named(make_engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(InputError, match=r"needs the package nixl.*pip install 'qserve-kit\[nixl"):
        make_engine("kv_both")


@needs_nixl
def test_missing_nixl_backend_is_reported():
    with pytest.raises(InputError, match=r"no backend NONE.*UCX"):
        NixlAgent("a", "NONE")


@needs_nixl
def test_unfinished_read_retires_its_memory(make_engine, cold, monkeypatch):
    """Its memory is used no more, and the next engine's pages arrive in other memory."""
    prefill, decode = make_engine("kv_producer"), make_engine("kv_consumer")
    run(prefill, [PROMPT], ONE)
    link = decode.workers._ours.transfers.peer._link
    monkeypatch.setattr(agents, "READ_SECONDS", 0.0)
    monkeypatch.setattr(agents, "SPINS", 0)
    monkeypatch.setattr(link._agent._agent, "check_xfer_state", lambda handle: "PROC")
    monkeypatch.setattr(link._agent._agent, "transfer", lambda handle: "PROC")
    tokens, cached = run(decode, [PROMPT], options=AWAITS)
    assert tokens == [cold(PROMPT)] and cached == [0]
    assert link._agent._lost


@needs_nixl
@pytest.mark.exhaustive
def test_process_kill_between_layers(make_engine, cold, docs_5m, tmp_path):
    """The request is computed immediately, not after its patience."""
    decode = make_engine("kv_consumer", extra={"patience_s": 1000})
    transfer = decode.config.kv_transfer_config.replace("kv_consumer", "kv_producer")
    command = [sys.executable, "-c", DYING, str(docs_5m), transfer, "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as dying:
        while (line := dying.stdout.readline()) != "READY\n":
            assert line
        started = []

        def die():
            if not started and decode._pending.num_waiting:
                started.append(dying.stdin.write("go\n"))
                dying.stdin.flush()

        tokens, cached = run(decode, [PROMPT], options=AWAITS, between=die)
        assert dying.wait(60) == -9
    assert tokens == [cold(PROMPT)] and cached == [0]
    assert not receiver(decode).num_peers  # looks, and removes dead engines' files
    assert not list((tmp_path / "peers").iterdir())


@needs_nixl
@pytest.mark.exhaustive
def test_one_and_two_rank_engines_exchange_pages(docs_5m, tmp_path):
    """KV heads are divided on one side, in both directions."""
    exchange_between_one_rank_and_two("nixl", "cpu", docs_5m, tmp_path)
