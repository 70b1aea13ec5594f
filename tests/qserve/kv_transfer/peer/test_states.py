"""Engines of models with states send each other the states with which prompts continue."""

import fcntl
import json
import logging

import pytest
import torch

from formats.errors import InputError
from qserve.engine.kv_cache import state_snapshots
from qserve.engine.pending import peer_kv
from qserve.kv_transfer.peer import peers
from tests.qserve.kv_transfer.peer.test_engines import (  # noqa: F401
    AWAITS,
    GREEDY,
    ONE,
    connector,
    make_engine,
    run,
)
from tests.qserve.kv_transfer.test_states import FAMILIES, cold  # noqa: F401
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp
from tests.qserve.speculation.mtp_model import make_mtp

PROMPT = list(range(5, 46))  # 10 pages and a token
exhaustive = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


@pytest.fixture
def make(make_engine, tiny_model):  # noqa: F811
    """Role -> engine of a family with states."""
    return lambda role, family="qwen3_5", **settings: make_engine(
        role, model=tiny_model(family), **settings
    )


def all_free(engine):
    """Return True if no page and no slot is reserved."""
    snapshots = engine.scheduler.snapshots
    return engine.scheduler.pool.num_free == 100 and not snapshots._reserved


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(each, marks=exhaustive) for each in FAMILIES)]
)
def test_decoded_tokens_equal_one_engine(family, make, cold):  # noqa: F811
    prefill, decode = make("kv_producer", family), make("kv_consumer", family)
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(decode, [PROMPT])
    assert tokens == cold(family, PROMPT) and cached == [40]
    assert all_free(decode)


def test_request_waits_for_chunked_remote_prompt(make, cold):  # noqa: F811
    """The prompts take several steps of the other engine, which begins after the wait."""
    prompts = [[n, *range(10, 90)] for n in range(3, 6)]
    prefill = make("kv_producer", max_num_batched_tokens=32)
    decode = make("kv_consumer")
    for index, prompt in enumerate(prompts):
        prefill.add_request(str(index), prompt, ONE)
    ran = []

    def compute():
        if decode._pending.num_waiting and prefill.has_work():
            ran.append(prefill.step())

    tokens, cached = run(decode, prompts, options=AWAITS, between=compute)
    assert len(ran) > 3
    assert tokens == cold("qwen3_5", *prompts) and cached == [80] * 3
    assert all_free(decode)


def test_prefixes_cached_on_both_sides(make, cold):  # noqa: F811
    """The sender continues from its own snapshot, and the receiver has the first pages."""
    longer = PROMPT + PROMPT[::-1]  # 20 pages and 2 tokens
    prefill, decode = make("kv_producer"), make("kv_consumer")
    run(prefill, [PROMPT], ONE)
    assert run(decode, [PROMPT]) == (cold("qwen3_5", PROMPT), [40])
    tokens, cached = run(prefill, [longer], ONE)
    assert cached == [40]
    assert run(decode, [longer]) == (cold("qwen3_5", longer), [80])
    # a receiver without any pages: the sender does not compute them again
    assert run(make("kv_consumer"), [longer]) == (cold("qwen3_5", longer), [80])


def test_restored_state_is_sent_again_after_it_was_overwritten(make, cold):  # noqa: F811
    """The sender has the whole prefix in its own cache, but no longer in its buffer."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    run(prefill, [PROMPT], ONE)
    peers_of = prefill.workers._ours.transfers
    for n in range(peers_of.peer_states.num_slots + 1):
        run(prefill, [[100 + n, *PROMPT[1:9]]], ONE)
    assert run(decode, [PROMPT])[1] == [0], "its state was overwritten"
    tokens, cached = run(prefill, [[*PROMPT, 7]], ONE)
    assert cached == [40]
    other = make("kv_consumer")
    assert run(other, [[*PROMPT, 9]]) == (cold("qwen3_5", [*PROMPT, 9]), [40])


def test_outputs_of_one_prompt_share_its_state(make, cold):  # noqa: F811
    prefill, decode = make("kv_producer"), make("kv_consumer")
    run(prefill, [PROMPT], ONE)
    tokens, cached = run(decode, [PROMPT] * 3)
    assert tokens == cold("qwen3_5", *[PROMPT] * 3) and cached == [40] * 3
    assert all_free(decode)


def test_earlier_state_is_used_if_last_one_is_not_made(make, cold, monkeypatch):  # noqa: F811
    """The sender makes no copy 8 tokens after the one from which it continues."""
    prompt = [*PROMPT[:40], *range(60, 69)]  # 12 pages and a token
    prefill, decode = make("kv_producer"), make("kv_consumer")
    run(prefill, [PROMPT], ONE)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 16)
    prefill.add_request("0", prompt, ONE)

    def compute():
        if decode._pending.num_waiting:
            if prefill.has_work():
                prefill.step()
            else:
                decode.stop_waiting("0")

    tokens, cached = run(decode, [prompt], options=AWAITS, between=compute)
    assert tokens == cold("qwen3_5", prompt) and cached == [40]


def test_state_is_received_if_pages_are_local(make, cold):  # noqa: F811
    prefill, decode = make("kv_producer"), make("kv_consumer", num_state_snapshots=1)
    run(prefill, [PROMPT], ONE)
    run(decode, [PROMPT])
    decode.scheduler.snapshots.drop_all()
    received = decode._remote_kv._num_hits
    assert run(decode, [PROMPT]) == (cold("qwen3_5", PROMPT), [40])
    assert decode._remote_kv._num_hits == received, "no page was received"


@pytest.mark.parametrize("snapshots", [1, 2])
def test_few_slots_of_snapshots(snapshots, make, cold):  # noqa: F811
    """Requests wait for a free slot; none is lost."""
    prompts = [[n, *PROMPT[1:]] for n in range(60, 66)]
    prefill = make("kv_producer", max_num_seqs=2)
    decode = make("kv_consumer", num_state_snapshots=snapshots, max_num_seqs=6)
    run(prefill, prompts, ONE)
    tokens, cached = run(decode, prompts)
    assert tokens == cold("qwen3_5", *prompts) and cached == [40] * 6
    assert all_free(decode)


def test_no_free_slot_is_computed(make, cold, monkeypatch):  # noqa: F811
    monkeypatch.setattr(peer_kv, "ROOM_SECONDS", 0.05)
    prefill, decode = make("kv_producer"), make("kv_consumer", num_state_snapshots=2)
    run(prefill, [PROMPT], ONE)
    slot = decode.scheduler.snapshots.reserve()
    assert run(decode, [PROMPT]) == (cold("qwen3_5", PROMPT), [0])
    decode.scheduler.snapshots.give_up(slot)
    assert all_free(decode)


@pytest.mark.parametrize("lost", ["pages", "states", "copy"])
def test_lost_sender_is_recomputed(lost, make, cold, monkeypatch):  # noqa: F811
    """It goes before it sends pages, before it sends the state, or in the middle of the state."""
    monkeypatch.setattr(peers, "SCAN_SECONDS", 0.01)
    prefill = make("kv_producer")
    decode = make("kv_consumer", extra={"patience_s": 1000})
    runner, gone = prefill.runner, []
    senders = runner.senders.pages, runner.senders.states
    sender = senders[lost != "pages"]
    send = sender._send

    def goes(batch, cache):
        if batch.num_sent < int(lost == "copy"):
            send(batch, cache)
        elif not gone:
            for each in senders:
                fcntl.flock(each._index._file, fcntl.LOCK_UN)
            gone.append(lost)
            batch.num_sent = 100

    monkeypatch.setattr(sender, "_send", goes)
    prefill.add_request("0", PROMPT, ONE)

    def compute():
        if decode._pending.num_waiting and prefill.has_work() and not gone:
            prefill.step()

    tokens, cached = run(decode, [PROMPT], options=AWAITS, between=compute)
    assert gone and tokens == cold("qwen3_5", PROMPT) and cached == [0]
    assert all_free(decode)


@pytest.mark.parametrize("ending", ["patience", "stopped"])
def test_state_that_does_not_come_is_computed(ending, make, cold, monkeypatch):  # noqa: F811
    prefill = make("kv_producer")
    monkeypatch.setattr(prefill._remote_kv, "_send_states", lambda plan: None)
    run(prefill, [PROMPT], ONE)
    decode = make("kv_consumer", extra={"patience_s": 0.2 if ending == "patience" else 100})
    stop = decode.stop_waiting if ending == "stopped" else lambda _: None
    tokens, cached = run(decode, [PROMPT], options=AWAITS, between=lambda: stop("0"))
    assert tokens == cold("qwen3_5", PROMPT) and cached == [0]
    assert all_free(decode)


def test_aborted_request_frees_its_slot(make):
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prefill._remote_kv._send_states = lambda plan: None
    run(prefill, [PROMPT], ONE)
    decode.add_request("0", PROMPT, GREEDY, options=AWAITS)
    snapshots = decode.scheduler.snapshots
    for _ in range(1000):
        if snapshots._reserved:
            break
        decode.step()
    assert snapshots._reserved and decode.scheduler.pool.num_free == 90
    decode.abort("0")
    for _ in range(1000):
        if not decode.has_work():
            break
        assert not decode.step()
    assert all_free(decode)
    decode.scheduler.check_integrity()


@pytest.mark.parametrize("come", [True, False])
def test_states_arriving_during_sleep_are_dropped(come, make, cold):  # noqa: F811
    prefill, decode = make("kv_producer"), make("kv_consumer")
    if not come:
        prefill._remote_kv._send_states = lambda plan: None
    for name in ("0", "1"):  # the second one follows the first
        decode.add_request(name, PROMPT, GREEDY, options=AWAITS)
    decode.step()
    run(prefill, [PROMPT], ONE)
    (fetch,) = decode._remote_kv._fetches.values()
    assert fetch.loads.result(30) == [True] * 10
    while fetch.states.load is None:
        decode.step()
    if come:
        assert fetch.states.load.result(30) == [True]
    decode.pause("keep")
    decode.recompute_all()
    assert fetch.states.load.done() and not decode._pending.num_waiting
    decode.operations.sleep(1)
    decode.operations.wake_up()
    decode.resume()
    decode.scheduler.check_integrity()
    tokens = {"0": [], "1": []}
    while decode.has_work():
        for event in decode.step():
            tokens[event.request_id] += event.token_ids
    assert list(tokens.values()) == cold("qwen3_5", PROMPT, PROMPT)
    assert all_free(decode)


def test_failed_step_states_are_not_sent(make, cold, monkeypatch):  # noqa: F811
    """The step that computes the end of the prompt fails before its states are copied."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    move = prefill.runner.layer_caches.move
    steps = []

    def fails(step):
        steps.append(step)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("out of memory")
        move(step)

    monkeypatch.setattr(prefill.runner.layer_caches, "move", fails)
    prefill.add_request("0", PROMPT, ONE)
    errors = [event.error for _ in range(2) for event in prefill.step()]
    assert any("ran out of memory" in error for error in errors)
    assert run(decode, [PROMPT]) == (cold("qwen3_5", PROMPT), [0])
    run(prefill, [[3, *PROMPT]], ONE)
    assert run(decode, [[3, *PROMPT]]) == (cold("qwen3_5", [3, *PROMPT]), [40])


def test_engines_with_other_drafts_are_refused(make, cold, caplog):  # noqa: F811
    """Their states also keep the inputs of rows that may be rejected."""
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    prefill, decode = make("kv_producer"), make("kv_consumer", speculative_config=drafts)
    run(prefill, [PROMPT], ONE)
    with caplog.at_level(logging.ERROR):
        assert run(decode, [PROMPT]) == (cold("qwen3_5", PROMPT), [0])
    assert "rows of a verification: expected" in caplog.text


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(each, marks=exhaustive) for each in FAMILIES[:4])]
)
def test_drafts_continue_from_received_states(family, make, cold):  # noqa: F811
    """Short chunks leave rows that the states lack, whose inputs are sent too."""
    prompt = [5, 6, 7, 8] * 10 + [5]
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 7, "adaptive": False})
    settings = {"speculative_config": drafts}
    prefill = make("kv_producer", family, max_num_batched_tokens=6, max_num_seqs=2, **settings)
    decode = make("kv_consumer", family, **settings)
    run(prefill, [prompt], ONE)
    assert run(decode, [prompt]) == (cold(family, prompt), [40])
    received = decode.runner.layer_caches.covered.covered_P
    assert received.max() > 0


def test_pages_of_mtp_layer_are_sent(make_engine, cold, tmp_path):  # noqa: F811
    """They arrive as the sender's drafter has written them, after the model's layers."""
    folder = make_hybrid_mtp(tmp_path / "mtp", "qwen3_5", 0.9)
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    settings = {"model": folder, "speculative_config": json.dumps(drafts)}
    prefill = make_engine("kv_producer", max_num_batched_tokens=16, **settings)
    decode = make_engine("kv_consumer", **settings)
    counts = []
    decode.scheduler.speculation.observe = lambda *each: counts.append(each)
    run(prefill, [PROMPT], ONE)
    assert run(decode, [PROMPT]) == (cold(str(folder), PROMPT), [40])
    assert any(accepted for _, accepted in counts)
    pools = [engine.scheduler.pool._pages for engine in (prefill, decode)]
    shared = prefill.runner.senders.pages._known.keys() & pools[0].keys() & pools[1].keys()
    assert len(shared) == 10
    (ours,), (theirs,) = (engine.runner.speculator.caches for engine in (prefill, decode))
    for one, other in zip(ours.page_tensors, theirs.page_tensors, strict=True):
        assert one.any()
        for key in shared:
            assert torch.equal(one[pools[0][key]], other[pools[1][key]])


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_mtp_of_models_without_states(family, make_engine, cold, tmp_path):  # noqa: F811
    """The last page depends on the next token, so it is computed again."""
    folder = make_mtp(tmp_path / "mtp", agreement=0.9, family=family)
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    settings = {"model": folder, "speculative_config": json.dumps(drafts)}
    prefill, decode = make_engine("kv_producer", **settings), make_engine("kv_consumer", **settings)
    counts = []
    decode.scheduler.speculation.observe = lambda *each: counts.append(each)
    run(prefill, [PROMPT], ONE)
    assert run(decode, [PROMPT]) == (cold(str(folder), PROMPT), [36])
    assert counts, "drafts were verified"


def test_other_drafters_are_refused(make_engine, tmp_path, docs_5m):  # noqa: F811
    drafts = {"method": "draft_model", "model": str(docs_5m), "num_speculative_tokens": 3}
    with pytest.raises(InputError, match="sends the KV pages of no drafter but mtp"):
        make_engine("kv_both", speculative_config=json.dumps(drafts))


def test_states_get_half_of_buffer(make):
    engine = make("kv_both", extra={"buffer_gb": 0.004})
    transfers = engine.workers._ours.transfers
    half = int(0.002 * 2**30)
    for each, size in (
        (transfers.peer, engine.runner.bytes_per_page),
        (transfers.peer_states, engine.runner.bytes_per_state),
    ):
        assert each.num_slots == half // size
    with pytest.raises(InputError, match="buffer_gb: expected at least .*, for"):
        make("kv_both", extra={"buffer_gb": 1e-5})


def test_convolutions_of_attention_are_refused(make):
    with pytest.raises(InputError, match="peer or nixl.*channels of its convolutions"):
        make("kv_both", "inkling")
