"""The engine apart from its scheduler: borrowed pages, failing rows, limits of a prompt."""

from dataclasses import replace

import pytest
import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.distributed.rank_channel import RankDiedError
from qserve.engine.engine import Engine
from qserve.engine.runner.graphs.cuda_graphs import StepGraphs
from qserve.engine.runner.model_runner import ModelRunner
from qserve.library.beam_outputs import sampling_params
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.engine.make_step import make_step

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)


@pytest.fixture
def make_engine(docs_5m):
    def make(steps_in_flight: int = 0, **settings) -> Engine:
        config = EngineConfig(
            model=str(docs_5m), device="cpu", block_size=4, num_gpu_blocks_override=50, **settings
        )
        return Engine(config, steps_in_flight=steps_in_flight)

    return make


def run_out(engine) -> dict[str, list]:
    """Collect the output of each request until all have finished."""
    found = {}
    while engine.has_work():
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event)
    return found


def tokens(events) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_logits_call_uses_only_free_pages(make_engine, monkeypatch):
    engine = make_engine()
    pool, used = engine.scheduler.pool, []
    want = engine.logits([5, 6, 7, 8, 9])
    kept = []
    pool.grow_(kept, 4 * 20)
    for cache in engine.runner.caches:
        cache.k_pages[kept] = cache.v_pages[kept] = 7.0
    logits = engine.workers.logits

    def watched(step):
        used.extend(step.block_tables_RX[0, :2].tolist())
        assert not step.block_tables_RX[0, 2:].any()
        pool.check_integrity([kept, used])
        return logits(step)

    monkeypatch.setattr(engine.workers, "logits", watched)
    assert torch.equal(engine.logits([5, 6, 7, 8, 9]), want)
    assert len(used) == 2
    assert all(
        (c.k_pages[kept] == 7).all() and (c.v_pages[kept] == 7).all() for c in engine.runner.caches
    )
    pool.check_integrity([kept])
    with pytest.raises(InputError, match="expected 1 to 120 tokens, found 121"):
        engine.logits([5] * 121)


def test_failed_logits_call_frees_pages(make_engine, monkeypatch):
    engine = make_engine()

    def fail(step):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.workers, "logits", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.logits([5] * 9)
    assert engine.scheduler.pool.num_free == 50


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_nan_row_fails_only_its_request(make_engine, steps_in_flight, monkeypatch):
    """Also where the next step was launched before the host learns of it."""
    engine = make_engine(steps_in_flight)
    engine.add_request("good", [5, 6, 7], GREEDY)
    want = tokens(run_out(engine)["good"])
    logits, failures = engine.runner.decoder.logits, []

    def first_row_fails(hidden):
        found = logits(hidden)
        if not failures:
            found[0] = torch.nan
            failures.append(found)
        return found

    monkeypatch.setattr(engine.runner.decoder, "logits", first_row_fails)
    engine.add_request("bad", [8, 9], GREEDY)
    engine.add_request("good", [5, 6, 7], GREEDY)
    found = run_out(engine)
    (failed,) = found["bad"]
    assert (failed.finish_reason, failed.error) == ("error", "the model's logits contain NaN")
    assert tokens(found["good"]) == want
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == 50


def test_clients_and_groups_alternate(make_engine):
    engine = make_engine(max_num_seqs=1)
    for name, client, group in (("a", "", "1"), ("b", "", "1"), ("c", "", "2"), ("d", "x", "1")):
        engine.add_request(name, [5, 6], GREEDY, client=client, group=group)
    assert list(run_out(engine)) == ["a", "d", "c", "b"]


def test_prompt_of_max_model_len_is_refused(make_engine):
    engine = make_engine(max_model_len=20)
    with pytest.raises(InputError, match="expected a prompt of 1 to 19 tokens, found 20"):
        engine.add_request("long", [5] * 20, GREEDY)
    engine.add_request("longest", [5] * 19, GREEDY)
    found = run_out(engine)
    assert list(found) == ["longest"] and len(tokens(found["longest"])) == 1


def test_request_length_is_limited_by_kv_cache(make_engine, caplog):
    engine = make_engine()
    assert engine.max_model_len == 200
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert record.getMessage().startswith("Using max model len 200 instead of 2048: the KV cache")
    endless = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    engine.add_request("fills", [5] * 190, endless)
    engine.add_request("asks for more", [5] * 190, replace(endless, max_tokens=999))
    found = run_out(engine)
    assert {name: len(tokens(events)) for name, events in found.items()} == {
        "fills": 10,
        "asks for more": 10,
    }
    with pytest.raises(InputError, match="expected a prompt of 1 to 199 tokens, found 200"):
        engine.add_request("long", [5] * 200, GREEDY)


def test_steps_in_graphs_give_the_same_tokens(make_engine, monkeypatch):
    """With the padding of graphs and their fixed buffers, but run eagerly instead of replayed."""
    replayed = []

    def capture(graphs, key):
        graphs._buffers.pad_(key)
        graphs._batches[key] = graphs._buffers.batch(key, graphs._max_context_len)

    def replay(graphs, key):
        replayed.append(key)
        return graphs._step(graphs._batches[key])

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(StepGraphs, "replay", replay)
    plain, captured = (
        make_engine(steps_in_flight=1, max_num_seqs=6, max_num_batched_tokens=24) for _ in range(2)
    )
    captured.runner.capture_graphs(6, captured.max_model_len)
    found = []
    for engine in (plain, captured):
        for n in range(1, 8):
            params = SamplingParams(max_tokens=3 + n, ignore_eos=True, temperature=0, logprobs=0)
            engine.add_request(str(n), list(range(5, 5 + 7 * n)), params)
        found.append({name: tokens(events) for name, events in run_out(engine).items()})
    assert found[0] == found[1]
    assert {key.is_chunk for key in replayed} == {True, False}


ON_THE_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
ON_THE_CPU += " memory: you tried to allocate 819200000000 bytes."


@pytest.mark.parametrize(
    ("in_flight", "error"),
    [
        (0, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
        (1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
        (0, RuntimeError(ON_THE_CPU)),
        (1, RuntimeError("Triton Error [CUDA]: out of memory")),
    ],
)
def test_out_of_memory_step_fails_only_its_requests(make_engine, monkeypatch, in_flight, error):
    engine = make_engine(steps_in_flight=in_flight, max_num_seqs=2)
    engine.add_request("alone", [5, 6, 7], GREEDY)
    want = tokens(run_out(engine)["alone"])
    for name in ("a", "b", "waits"):
        engine.add_request(name, [5, 6, 7], GREEDY)
    engine.step()
    launch = engine.workers.launch

    def fails_once(step):
        monkeypatch.setattr(engine.workers, "launch", launch)
        raise error

    monkeypatch.setattr(engine.workers, "launch", fails_once)
    found = run_out(engine)
    for name in ("a", "b"):
        last = found[name][-1]
        assert last.finish_reason == "error" and "--max-num-batched-tokens" in last.error
        assert tokens(found[name]) == want[:in_flight], "what was in flight still came"
    assert tokens(found["waits"]) == want
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == 50
    assert not engine._requests


def test_out_of_memory_beam_search_fails_once(make_engine, monkeypatch):
    engine, params = make_engine(), BeamSearchParams(beam_width=3, max_tokens=6)
    options = RequestOptions(beam_search=params)
    engine.add_request("beams", [5, 6, 7], sampling_params(params), options=options)
    engine.step()
    engine.step()

    def fails(step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.workers, "launch", fails)
    (event,) = engine.step()
    assert (event.request_id, event.finish_reason) == ("beams", "error")
    assert not engine.has_work() and engine.scheduler.pool.num_free == 50


def test_other_step_errors_are_not_treated_as_out_of_memory(make_engine, monkeypatch):
    """The death of a rank, for any reason, is not treated as out of memory either: the engine
    ends."""
    for error in (RuntimeError("a kernel failed"), RankDiedError("1: CUDA error: out of memory")):
        engine = make_engine()
        engine.add_request("a", [5, 6, 7], GREEDY)
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(engine.workers, "launch", lambda step, e=error: (_ for _ in ()).throw(e))
            engine.step()


@pytest.mark.parametrize(
    ("settings", "knob"),
    [
        ({}, "--num-gpu-blocks-override"),
        ({"num_gpu_blocks_override": None}, "--cpu-kv-cache-memory"),
        ({"num_gpu_blocks_override": None, "kv_cache_memory": 0.01}, "--kv-cache-memory"),
    ],
)
def test_too_little_memory_for_pages_error_names_flag(docs_5m, monkeypatch, settings, knob):
    def fails(runner, num_pages):
        raise RuntimeError(ON_THE_CPU)

    monkeypatch.setattr(ModelRunner, "allocate_pages", fails)
    config = {"model": str(docs_5m), "device": "cpu", "num_gpu_blocks_override": 50} | settings
    with pytest.raises(InputError, match=f"^memory: ran out while making.*lower {knob}"):
        Engine(EngineConfig(**config))


def as_a_capture_ends(error):
    """torch's own error at the end of a capture in which another was raised."""
    try:
        try:
            raise error
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
    except RuntimeError as last:
        return last


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),  # pinned memory's
        as_a_capture_ends(RuntimeError("Triton Error [CUDA]: out of memory")),
        MemoryError(),
    ],
    ids=["torch", "triton", "cublas", "pinned", "capture's end", "host"],
)
def test_out_of_memory_in_capture_keeps_captured_graphs(make_engine, monkeypatch, error):
    captured = []

    def capture(graphs, key):
        if len(captured) == 6:
            raise error
        captured.append(key)
        graphs._batches[key] = None

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    engine = make_engine(max_num_seqs=32, max_num_batched_tokens=64)
    engine.runner.capture_graphs(32, engine.max_model_len)
    graphs = engine.runner.graphs
    assert graphs.num_captured == 4, "at the start: the ends of both sorts"
    assert graphs.key_for(make_step([1] * 3)).num_tokens == 4
    assert graphs.key_for(make_step([1] * 3)).num_tokens == 4
    assert len(captured) == 5
    while engine.use_idle_time():
        pass
    assert graphs.num_captured == graphs.num_keys == 6
    assert graphs.key_for(make_step([1] * 9)).num_tokens == 32, "the next that is there"
    assert not engine.use_idle_time()


def test_other_capture_errors_are_not_treated_as_out_of_memory(make_engine, monkeypatch):
    engine = make_engine(max_num_seqs=32, max_num_batched_tokens=64)
    monkeypatch.setattr(
        StepGraphs, "_capture", lambda graphs, key: graphs._batches.update({key: None})
    )
    engine.runner.capture_graphs(32, engine.max_model_len)

    def fails(graphs, key):
        raise as_a_capture_ends(RuntimeError("a kernel failed"))

    monkeypatch.setattr(StepGraphs, "_capture", fails)
    with pytest.raises(RuntimeError, match="previous error"):
        engine.runner.graphs.capture_next()


def test_context_beyond_graph_limit_runs_eagerly(make_engine, monkeypatch):
    monkeypatch.setattr(StepGraphs, "_capture", lambda graphs, key: graphs._batches.setdefault(key))
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=64, max_seq_len_to_capture=40)
    engine.runner.capture_graphs(4, engine.max_model_len)
    graphs = engine.runner.graphs
    assert graphs.key_for(make_step([1], max_context_len=40)) is not None
    assert graphs.key_for(make_step([1], max_context_len=41)) is None


@pytest.mark.parametrize("in_flight", [0, 1])
def test_output_of_one_token_takes_no_decode_step(make_engine, monkeypatch, in_flight):
    engine = make_engine(steps_in_flight=in_flight)
    launch, counts = engine.workers.launch, []
    monkeypatch.setattr(
        engine.workers, "launch", lambda step: (counts.append(step.num_tokens), launch(step))[1]
    )
    one = SamplingParams(max_tokens=1, temperature=0)
    engine.add_request("a", [5, 6, 7], one)
    engine.add_request("b", [5, 6, 7, 8], one)
    assert [len(tokens(events)) for events in run_out(engine).values()] == [1, 1]
    assert counts == [7]


def test_async_scheduling_can_be_off(make_engine, docs_5m, monkeypatch):
    from qserve.engine.distributed.worker_group import WorkerGroup

    monkeypatch.setattr(WorkerGroup, "computes_in_launch", False)
    for on in (True, False):
        config = EngineConfig(
            model=str(docs_5m),
            device="cpu",
            num_gpu_blocks_override=9,
            admission="fits",
            async_scheduling=on,
        )
        assert Engine(config)._max_in_flight == on
