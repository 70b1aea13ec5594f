"""Out-of-memory errors in or after the moves of the host tier: no page is wrong, none leaks.

Faults are injected where a GPU has them: in the buffers of a copy, anywhere in a copy, and in the
forward pass after it.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from qkernels.attention.cache import PagedKv
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.kv_cache.host_tier import HostTier, PageMoves
from qserve.engine.runner import page_copies
from qserve.engine.runner.page_copies import PageCopies
from qserve.kv_transfer.rank_pages import RankPages
from tests.qserve.engine.test_engine_cache import GREEDY, PAGE, run, turns

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
OFFLOAD = {"num_gpu_blocks_override": 13, "admission": "fits", "kv_offload_gb": 0.01}


@pytest.fixture(scope="module")
def make_engine(docs_5m):
    def make(steps_in_flight: int = 0, **settings) -> Engine:
        settings = {"num_gpu_blocks_override": 100, "max_num_seqs": 4} | settings
        config = EngineConfig(model=str(docs_5m), device="cpu", block_size=PAGE, **settings)
        return Engine(config, steps_in_flight=steps_in_flight)

    return make


@pytest.fixture(scope="module")
def cold(make_engine):
    """The tokens of each round without a cache."""
    engine = make_engine(enable_prefix_caching=False)
    return [run(engine, prompts)[0] for prompts in turns()]


def faults(function, *, every, late):
    """A function that has no memory every so many calls, before it does anything or after it."""
    calls = itertools.count(1)

    def faulty(*arguments, **fields):
        fails = not next(calls) % every
        if late or not fails:
            result = function(*arguments, **fields)
        if fails:
            raise NO_MEMORY
        return result

    return faulty


# where: what fails, how often
PLACES = {
    "store": (lambda engine: engine.runner.layer_caches.page_copies, "_store", 2),
    "load": (lambda engine: engine.runner.layer_caches.page_copies, "_load", 3),
    "forward": (lambda engine: engine.runner.decoder, "logits", 11),
}
more = pytest.mark.exhaustive


@pytest.mark.exhaustive
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=more)])
@pytest.mark.parametrize("in_flight", [pytest.param(0, marks=more), 1])
@pytest.mark.parametrize("place", PLACES)
def test_requests_surviving_out_of_memory_have_correct_tokens(
    place, late, in_flight, make_engine, cold, monkeypatch
):
    """Requests of a failed step end; the same prompts again, and all others, get their tokens."""
    engine = make_engine(in_flight, **OFFLOAD)
    find, name, every = PLACES[place]
    faulty = faults(getattr(find(engine), name), every=every, late=late)
    num_failed = num_done = 0
    for prompts, want in [*zip(turns(), cold, strict=True)] * 2:
        with monkeypatch.context() as patch:
            patch.setattr(find(engine), name, faulty)
            for index, prompt in enumerate(prompts):
                engine.add_request(str(index), prompt, GREEDY)
            tokens = {str(index): [] for index in range(len(prompts))}
            while engine.has_work():
                for event in engine.step():
                    tokens[event.request_id] += event.token_ids
                    num_failed += event.finish_reason == "error"
                    if event.finish_reason == "length":
                        assert tokens[event.request_id] == want[int(event.request_id)]
                        num_done += 1
                engine.scheduler.check_integrity()
        # Without faults, no remaining page is wrong.
        assert run(engine, prompts)[0] == want
    host = engine.scheduler.pool.host
    assert num_failed and num_done and host.num_loaded
    assert engine.scheduler.pool.num_free == 13
    assert sorted([*host._slots.values(), *host._free]) == list(range(host.num_slots))


def test_page_filled_by_failed_step_is_not_cached(make_engine, monkeypatch):
    """Its request had ended already, by a token of the step before, which was in flight."""
    prompt = list(range(5, 14))
    engine = make_engine(1, num_gpu_blocks_override=30, admission="fits")
    (whole,), _ = run(engine, [prompt], replace(GREEDY, max_tokens=12))
    count = next(
        n
        for n in range(3, 12)
        if (len(prompt) + n) % PAGE == 0 and whole[n - 1] not in whole[: n - 1]
    )
    stops = replace(GREEDY, max_tokens=12, stop_token_ids=(whole[count - 1],))
    engine = make_engine(1, num_gpu_blocks_override=30, admission="fits")
    launch, made = engine.workers.launch, []

    def fails_after_the_last(step):
        made.append(step)
        if len(made) == count + 1:
            raise NO_MEMORY
        return launch(step)

    monkeypatch.setattr(engine.workers, "launch", fails_after_the_last)
    (tokens,), _ = run(engine, [prompt], stops)
    assert tokens == whole[:count] and len(made) == count + 1
    further = [*prompt, *tokens, 77]
    want, _ = run(make_engine(enable_prefix_caching=False), [further])
    found = run(engine, [further])
    assert found == (want, [len(prompt) + count - PAGE])


def test_failed_logits_call_caches_no_page(make_engine, monkeypatch):
    engine, prompt = (
        make_engine(num_gpu_blocks_override=8, admission="fits", kv_offload_gb=0.01),
        list(range(5, 25)),
    )
    want, _ = run(engine, [prompt])

    def no_memory(moves):
        raise NO_MEMORY

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(engine.runner.layer_caches.page_copies, "store", no_memory)
        engine.logits(list(range(100, 130)))
    assert run(engine, [prompt])[0] == want
    engine.scheduler.check_integrity()


def test_request_sharing_failed_page_fails(make_engine):
    """It was admitted with the step, but had no tokens in it: it waits for a mask."""
    engine = make_engine(**OFFLOAD)
    engine.add_request("in the step", list(range(5, 14)), GREEDY)
    engine.add_request("beside it", list(range(50, 59)), GREEDY)
    engine.add_request("neither", list(range(80, 89)), GREEDY)
    plan = engine.scheduler.schedule()
    chunk, beside, _ = plan.chunks
    loaded = np.array(beside.request.block_table[:1])
    moves = PageMoves(loaded_pages=loaded, loaded_slots=np.array([0]))
    plan = replace(plan, chunks=(chunk,), moves=moves)
    events = engine.scheduler.fail_step(plan, "no memory")
    assert [event.request_id for event in events] == ["in the step", "beside it"]
    assert [request.request_id for request in engine.scheduler.running] == ["neither"]
    engine.scheduler.check_integrity()


def test_only_pages_being_stored_are_dropped():
    pool = BlockPool(2, PAGE, HostTier(3))
    table: list[int] = []
    for keys in ((b"a", b"b"), (b"c", b"d")):
        pool.grow_(table, 2 * PAGE)
        for page, key in zip(table, keys, strict=True):
            pool.insert(page, key)
        moves = pool.take_moves()
        pool.release_(table)
    assert moves.stored_pages.tolist()
    assert pool.host.match([b"a"]) == pool.host.match([b"b"]) == 1
    pool.load_(table, [b"a"])
    moves = pool.take_moves()
    pool.invalidate_moves(moves)
    assert pool.host.match([b"a"]) == 1, "it was there before, and still is"
    assert pool.host.match([b"b"]) == 1 and pool.match([b"a"]) == []
    stored = {b"c", b"d"} & set(pool.host._slots)
    assert not stored, "nobody knows whether it was stored"
    pool.release_(table)
    pool.check_integrity([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    "error",
    [NO_MEMORY, RuntimeError("CUDA error: out of memory"), RuntimeError("a kernel failed")],
    ids=["device", "pinned", "another"],
)
def test_copies_without_buffer_are_equal(dtype, error, monkeypatch):
    device = torch.device("cpu")
    caches = [PagedKv.zeros((9, 4, 3, 7), dtype, device) for _ in range(2)]
    copies = PageCopies(caches, 6, device)
    parts = [part for cache in caches for part in cache.page_tensors]
    for part in parts:
        part.copy_(torch.randint(1, 100, part.shape).to(part.dtype))
    want = [part[[7, 2, 5]].clone() for part in parts]

    def no_memory(*arguments, **fields):
        raise error

    there = np.array([7, 2, 5]), np.array([4, 0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(page_copies, "to_device", no_memory)
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            with pytest.raises(RuntimeError, match="a kernel failed"):
                copies.store(PageMoves(stored_pages=there[0], stored_slots=there[1]))
            with pytest.raises(RuntimeError, match="a kernel failed"):
                copies.read([7])
            return
        assert copies.read([7]) is None
        copies.store(PageMoves(stored_pages=there[0], stored_slots=there[1]))
        for part in parts:
            part.zero_()
        copies.load(PageMoves(loaded_pages=np.array([0, 1, 8]), loaded_slots=there[1]))
    for part, kept in zip(parts, want, strict=True):
        assert torch.equal(part[[0, 1, 8]], kept) and not part[2:8].any()
    copies.load(PageMoves(loaded_pages=np.array([2, 3, 4]), loaded_slots=there[1]))
    for part, kept in zip(parts, want, strict=True):
        assert torch.equal(part[[2, 3, 4]], kept)


def test_pages_that_cannot_be_copied_are_not_saved():
    class Copies:
        page_bytes = 8

        def read(self, pages):
            return None

    pages = RankPages(None, Copies())
    assert pages.save(np.zeros((1, 32), np.uint8), [3]).result(1) is None
