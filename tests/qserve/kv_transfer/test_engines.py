"""Two engines that exchange KV pages: one computes a prompt, the other decodes it."""

import json
import threading
from concurrent.futures import Future, wait

import numpy as np
import pytest

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.pending import remote_kv
from qserve.kv_transfer.connector import CONNECTORS
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
ONE = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
PAGE = 4
PROMPT = list(range(5, 30))  # 6 pages and a token
MAX_STEPS = 5000  # of an engine that waits for threads, 10 ms each: against hanging


class MemoryConnector:
    """A connector in memory."""

    def __init__(self):
        self.pages = {}
        self.gate = threading.Event()
        self.gate.set()
        self.fails = ()

    def match(self, keys):
        self.gate.wait(60)
        if "match" in self.fails:
            raise OSError("the network is down")
        found = [key in self.pages for key in keys]
        return found.index(False) if False in found else len(keys)

    def load(self, key, page):
        self.gate.wait(60)
        if "load" in self.fails:
            raise OSError("the network is down")
        if key not in self.pages:
            return False
        page[:] = self.pages[key]
        return True

    def save(self, key, page):
        self.gate.wait(60)
        if "save" in self.fails:
            raise OSError("the disk is full")
        self.pages[key] = bytes(page)


@pytest.fixture
def memory_connector(monkeypatch):
    made = MemoryConnector()
    monkeypatch.setitem(CONNECTORS, "memory", lambda settings, page_bytes: made)
    return made


@pytest.fixture
def make_engine(docs_5m):
    def make(connector="memory", role="kv_both", steps_in_flight=0, model=docs_5m, **settings):
        extra = {"path": str(connector)} if connector != "memory" else {}
        transfer = {
            "kv_connector": "memory" if connector == "memory" else "folder",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }
        settings = {"num_gpu_blocks_override": 100, "max_num_seqs": 4} | settings
        settings = {"block_size": PAGE, "kv_transfer_config": json.dumps(transfer)} | settings
        config = EngineConfig(model=str(model), device="cpu", **settings)
        return Engine(config, steps_in_flight=steps_in_flight)

    return make


def finish(engine, tokens, cached, errors=None):
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            return
        for event in engine.step():
            tokens[int(event.request_id)] += event.token_ids
            cached[int(event.request_id)] = event.facts.num_cached
            if errors is not None and event.error:
                errors.append(event.error)
        engine.scheduler.check_integrity()
    raise AssertionError("the engine did not come to an end")


def run(engine, prompts, params=GREEDY, **options):
    """Tokens and cached tokens of each prompt, all run together."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params, options=RequestOptions(**options))
    tokens, cached = [[] for _ in prompts], [0] * len(prompts)
    finish(engine, tokens, cached)
    settle(engine)
    return tokens, cached


def settle(engine):
    """Wait for what is being written."""
    for future in list(engine._remote_kv._writes):
        future.result(60)


@pytest.fixture(scope="module")
def cold(docs_5m):
    """dtype of the cache -> what the prompt is continued with, without any cache."""
    made = {}

    def tokens(dtype="auto"):
        if dtype not in made:
            config = EngineConfig(
                model=str(docs_5m),
                device="cpu",
                block_size=PAGE,
                num_gpu_blocks_override=100,
                kv_cache_dtype=dtype,
                enable_prefix_caching=False,
            )
            engine = Engine(config)
            engine.add_request("0", PROMPT, GREEDY)
            made[dtype] = [[]]
            while engine.has_work():
                for event in engine.step():
                    made[dtype][0] += event.token_ids
        return made[dtype]

    return tokens


@pytest.mark.parametrize(
    "dtype", ["auto", "int8", "int4", pytest.param("fp8", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_second_engine_decodes_from_pages_of_first(
    dtype, steps_in_flight, make_engine, cold, tmp_path
):
    settings = {"kv_cache_dtype": dtype, "steps_in_flight": steps_in_flight}
    prefill = make_engine(tmp_path, "kv_producer", **settings)
    first, cached = run(prefill, [PROMPT], ONE)
    assert cached == [0] and first[0] == cold(dtype)[0][:1]
    decode = make_engine(tmp_path, "kv_consumer", **settings)
    counted = [0]
    launch = decode.workers.launch

    def count(step):
        counted[0] += step.num_tokens
        return launch(step)

    decode.workers.launch = count
    assert run(decode, [PROMPT]) == (cold(dtype), [24])
    assert counted[0] == 1 + 7, "the last token of the prompt, and those that were fed back"


def test_next_chat_turn_hits_pages_of_other_engine(make_engine, memory_connector):
    (answer,), _ = run(make_engine(), [PROMPT])
    turn = [*PROMPT, *answer, 50, 51]
    want, _ = run(make_engine(role="kv_producer"), [turn])
    assert run(make_engine(), [turn]) == (want, [32])


def test_local_and_remote_pages_form_one_prefix(make_engine, memory_connector):
    long = [*PROMPT, *range(60, 75)]
    want, _ = run(make_engine(), [long])
    engine = make_engine()
    saved_pages, memory_connector.pages = memory_connector.pages, {}
    run(engine, [PROMPT])
    memory_connector.pages = saved_pages
    before = engine._remote_kv._num_queries
    assert run(engine, [long]) == (want, [36])
    assert engine.scheduler.pool.host.num_loaded == 3, "six of the nine were on the device"
    assert before == 0


def test_equal_prompts_fetch_pages_once(make_engine, memory_connector, cold):
    run(make_engine(), [PROMPT])
    asked = []
    match = memory_connector.match
    memory_connector.match = lambda keys: asked.append(len(keys)) or match(keys)
    engine = make_engine()
    tokens, cached = run(engine, [PROMPT] * 4)
    assert tokens == cold() * 4 and cached == [24] * 4
    assert asked == [6]


def test_equal_unknown_prompts_query_once(make_engine, memory_connector, cold):
    asked = []
    match = memory_connector.match
    memory_connector.match = lambda keys: asked.append(len(keys)) or match(keys)
    tokens, _ = run(make_engine(), [PROMPT] * 4)
    assert tokens == cold() * 4 and asked == [6]


def test_other_requests_run_while_one_waits(make_engine, memory_connector, cold):
    run(make_engine(), [PROMPT])
    engine = make_engine()
    memory_connector.gate.clear()
    engine.add_request("0", PROMPT, GREEDY)
    engine.add_request("1", [7, 8], GREEDY)  # shorter than a page: nothing to ask for
    tokens, cached = [[], []], [0, 0]
    ended = False
    for _ in range(MAX_STEPS):
        for event in engine.step():
            tokens[int(event.request_id)] += event.token_ids
            ended |= event.request_id == "1" and event.finish_reason is not None
        if ended:
            break
    assert ended and not tokens[0] and engine.report().num_waiting == 1
    memory_connector.gate.set()
    finish(engine, tokens, cached)
    assert tokens[0] == cold()[0] and cached[0] == 24


@pytest.mark.parametrize("fails", ["match", "load", "save"])
def test_failing_connector_only_costs_time(fails, make_engine, memory_connector, cold, caplog):
    if fails != "save":
        run(make_engine(), [PROMPT])
    memory_connector.fails = (fails,)
    engine = make_engine()
    assert run(engine, [PROMPT]) == (cold(), [0])
    assert "network is down" in caplog.text or "disk is full" in caplog.text
    host = engine.scheduler.pool.host
    assert len(host._free) + len(host) == host.num_slots, "no slot is lost"


def test_missing_page_ends_the_prefix(make_engine, memory_connector, cold):
    """As one does that is removed or damaged between match and load."""
    run(make_engine(), [PROMPT])
    engine = make_engine()
    load = memory_connector.load
    third = list(memory_connector.pages)[2]
    memory_connector.load = lambda key, page: key != third and load(key, page)
    assert run(engine, [PROMPT]) == (cold(), [8])


def test_damaged_page_file_is_recomputed(make_engine, tmp_path, cold):
    run(make_engine(tmp_path), [PROMPT])
    for path in tmp_path.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[100] ^= 4
        path.write_bytes(data)
    assert run(make_engine(tmp_path), [PROMPT]) == (cold(), [0])


def test_remote_wait_times_out(make_engine, memory_connector, cold, monkeypatch):
    run(make_engine(), [PROMPT])
    monkeypatch.setattr(remote_kv, "PATIENCE_SECONDS", 0.05)
    engine = make_engine()
    memory_connector.gate.clear()
    engine.add_request("0", PROMPT, GREEDY)
    tokens, cached = [[]], [0]
    finish(engine, tokens, cached)
    memory_connector.gate.set()
    assert tokens == cold() and cached == [0]


def test_abort_while_waiting_for_pages(make_engine, memory_connector):
    run(make_engine(), [PROMPT])
    engine = make_engine()
    memory_connector.gate.clear()
    engine.add_request("0", PROMPT, GREEDY)
    engine.abort("0")
    assert not engine.has_work() and not engine._requests
    memory_connector.gate.set()
    assert run(engine, [PROMPT])[1] == [24]


@pytest.mark.parametrize("awaits", ["match", "load"])
def test_waiter_of_aborted_request_fetches_pages(
    awaits, make_engine, memory_connector, cold, monkeypatch
):
    """After the abort, the next request of the prompt fetches the pages without a timeout."""
    monkeypatch.setattr(remote_kv, "PATIENCE_SECONDS", 1e9)
    run(make_engine(), [PROMPT])
    engine = make_engine()
    if awaits == "match":
        memory_connector.gate.clear()
    for index in range(3):
        engine.add_request(str(index), PROMPT, GREEDY)
    (first, *_) = engine._remote_kv._fetches.values()
    if awaits == "load":
        first.match.result(60)
        memory_connector.gate.clear()
        engine.step()
        assert first.loads
    engine.abort("0")
    memory_connector.gate.set()
    wait(first.loads, 60)  # or the engine may end before they do
    tokens, cached = [[], [], []], [0, 0, 0]
    finish(engine, tokens, cached)
    assert tokens == [[], *cold() * 2] and cached == [0, 24, 24]
    assert engine.scheduler.pool.host._num_reserved == 0


def test_producer_replies_after_pages_are_saved(make_engine, memory_connector):
    engine = make_engine(role="kv_producer")
    memory_connector.gate.clear()
    engine.add_request("0", PROMPT, ONE)
    for _ in range(20):
        assert engine.step() == []
    assert engine.has_work() and not memory_connector.pages
    memory_connector.gate.set()
    tokens, cached = [[]], [0]
    finish(engine, tokens, cached)
    assert len(tokens[0]) == 1 and len(memory_connector.pages) == 6 and not engine._requests


def test_already_saved_pages_are_not_awaited(make_engine, memory_connector, monkeypatch):
    """Or the engine would spin until the slowest page is there."""
    engine = make_engine(role="kv_producer")
    waited = []
    monkeypatch.setattr(remote_kv, "wait", lambda futures, *_: waited.extend(futures))
    done, under_way = Future(), Future()
    done.set_result(None)
    engine._remote_kv._held["a"] = (None, [done, under_way])
    engine._remote_kv.queue_ready(wait_a_little=True)
    assert waited == [under_way]


def test_aborted_producer_frees_pages(make_engine, memory_connector):
    engine = make_engine(role="kv_producer")
    memory_connector.gate.clear()
    engine.add_request("0", PROMPT, ONE)
    for _ in range(5):
        engine.step()
    engine.abort("0")
    assert not engine.has_work() and not engine._requests
    memory_connector.gate.set()


# what makes another model, or another form of page, of it
OTHERS = {
    "salt": ({}, {"cache_salt": "one"}),
    "8 bits": ({"kv_cache_dtype": "int8"}, {}),
    "4 bits": ({"kv_cache_dtype": "int4"}, {}),
    "page size": ({"block_size": 8}, {}),
    "activations": ({"dtype": "bfloat16"}, {}),
    "weights": ({"load_format": "dummy"}, {}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_pages_of_other_layout_are_not_hit(other, make_engine, memory_connector):
    run(make_engine(), [PROMPT])
    settings, options = OTHERS[other]
    assert run(make_engine(**settings), [PROMPT], **options)[1] == [0]


def test_changed_weight_changes_model_digest(make_engine, memory_connector, docs_5m, tmp_path):
    run(make_engine(), [PROMPT])
    for path in docs_5m.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-1] ^= 1
        (tmp_path / path.name).write_bytes(data)
    assert run(make_engine(model=tmp_path), [PROMPT])[1] == [0]
    (tmp_path / "model.safetensors").write_bytes((docs_5m / "model.safetensors").read_bytes())
    assert run(make_engine(model=tmp_path), [PROMPT])[1] == [24], "a copy is the same model"


def test_reset_engine_shares_no_pages(make_engine, memory_connector, cold):
    """Not with one that was reset as often, either: each may have new weights of its own."""
    first, second = make_engine(), make_engine()
    run(first, [PROMPT])
    for engine in (first, second):
        engine.reset_prefix_cache()
    assert run(first, [PROMPT]) == (cold(), [0])
    assert run(second, [PROMPT]) == (cold(), [0])
    assert run(first, [PROMPT]) == (cold(), [24])


def test_failed_request_saves_no_pages(make_engine, memory_connector, monkeypatch):
    engine = make_engine()
    logits = engine.runner.decoder.logits
    monkeypatch.setattr(
        engine.runner.decoder, "logits", lambda hidden: logits(hidden) * float("nan")
    )
    errors = []
    engine.add_request("0", PROMPT, GREEDY)
    finish(engine, [[]], [0], errors)
    assert "NaN" in errors[0] and not memory_connector.pages


def test_limited_host_memory_loads_part_of_pages(make_engine, memory_connector, cold, monkeypatch):
    """Half of the slots at most are for what comes from elsewhere."""
    run(make_engine(), [PROMPT])
    engine = make_engine()
    page_bytes = engine.runner.bytes_per_page
    monkeypatch.setattr(remote_kv, "SLOT_BYTES", 6 * page_bytes)
    assert run(make_engine(), [PROMPT]) == (cold(), [12])


def test_pending_saves_are_bounded(make_engine, memory_connector, monkeypatch, caplog):
    engine = make_engine()
    monkeypatch.setattr(remote_kv, "MAX_UNWRITTEN_BYTES", 2 * engine.runner.bytes_per_page)
    run(engine, [PROMPT], ONE)
    assert len(memory_connector.pages) == 2 and "are not saved" in caplog.text


@pytest.mark.exhaustive
def test_chats_alternating_between_engines(make_engine, memory_connector):
    """Chats that grow, pages that run out on both devices, a small host tier."""
    plain = make_engine(enable_prefix_caching=False, kv_transfer_config=None)
    settings = {
        "num_gpu_blocks_override": 24,
        "admission": "fits",
        "kv_offload_gb": 0.005,
        "steps_in_flight": 1,
    }
    engines = [make_engine(**settings) for _ in range(2)]
    random = np.random.default_rng(3)
    system = random.integers(3, 8000, 21).tolist()
    chats = [list(system) for _ in range(3)]
    hits = 0
    for turn in range(4):
        for chat in chats:
            chat += random.integers(3, 8000, int(random.integers(1, 9))).tolist()
        want = []
        for chat in chats:
            plain.add_request("0", chat, GREEDY)
            tokens = [[]]
            finish(plain, tokens, [0])
            want += tokens
        got, cached = run(engines[turn % 2], chats)
        assert got == want
        hits += sum(cached)
        for chat, answer in zip(chats, got, strict=True):
            chat += answer
    assert hits > 300


def test_report_counts_remote_tokens(make_engine, memory_connector):
    run(make_engine(), [PROMPT])
    engine, queries, hits = make_engine(), 0, 0
    engine.add_request("0", PROMPT, GREEDY)
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            break
        engine.step()
        report = engine.report()
        queries += report.num_external_queries
        hits += report.num_external_hits
    assert (queries, hits) == (24, 24)
