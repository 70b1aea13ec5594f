"""The engine with the prefix cache: the same tokens, warm or cold, from the device or the host."""

import random

import numpy as np
import pytest
import torch

from qkernels.attention.cache import PagedKv
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.kv_cache.host_tier import PageMoves
from qserve.engine.runner.page_copies import PAGES_AT_ONCE, PageCopies, copy_pages
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
PAGE = 4


@pytest.fixture
def make_engine(docs_5m):
    def make(steps_in_flight: int = 0, **settings) -> Engine:
        settings = {"num_gpu_blocks_override": 100, "max_num_seqs": 4} | settings
        config = EngineConfig(model=str(docs_5m), device="cpu", block_size=PAGE, **settings)
        return Engine(config, steps_in_flight=steps_in_flight, clock=settings_clock)

    now = [0.0]

    def settings_clock() -> float:
        return now[0]

    make.now = now
    return make


def run(engine, prompts, params=GREEDY, **options):
    """Tokens and cached tokens of each prompt, all run together."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params, options=RequestOptions(**options))
    tokens, cached = [[] for _ in prompts], [0] * len(prompts)
    while engine.has_work():
        for event in engine.step():
            tokens[int(event.request_id)] += event.token_ids
            cached[int(event.request_id)] = event.facts.num_cached
        engine.scheduler.check_integrity()
    return tokens, cached


def turns(seed=7, num_chats=3, num_turns=3):
    """Rounds of prompts: chats that begin alike and grow."""
    rng = random.Random(seed)
    system = [rng.randrange(3, 8000) for _ in range(21)]
    chats = [[*system] for _ in range(num_chats)]
    for _ in range(num_turns):
        for chat in chats:
            chat += [rng.randrange(3, 8000) for _ in range(rng.randint(1, 9))]
        yield [list(chat) for chat in chats]


@pytest.fixture(scope="module")
def cold(docs_5m):
    """The tokens of each round without a cache."""
    config = EngineConfig(
        model=str(docs_5m),
        device="cpu",
        block_size=PAGE,
        num_gpu_blocks_override=100,
        enable_prefix_caching=False,
    )
    engine = Engine(config)
    return [run(engine, prompts)[0] for prompts in turns()]


# name -> engine settings, steps in flight, whether pages must come from the host
WARM = {
    "warm": ({}, 0, False),
    "a step in flight": ({}, 1, False),
    "small chunks": ({"max_num_batched_tokens": 5}, 1, False),
    "a token at a time": ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, 0, False),
    "too few pages": ({"num_gpu_blocks_override": 22, "admission": "fits"}, 1, False),
    "pages on the host": (
        {"num_gpu_blocks_override": 13, "admission": "fits", "kv_offload_gb": 0.01},
        1,
        True,
    ),
    "longest prefix": ({"scheduling_policy": "longest-prefix"}, 1, False),
}


@pytest.mark.parametrize("mode", WARM)
def test_tokens_are_the_same_with_hits(mode, make_engine, cold):
    settings, in_flight, from_host = WARM[mode]
    engine, num_cached = make_engine(in_flight, **settings), []
    for prompts, want in zip(turns(), cold, strict=True):
        tokens, cached = run(engine, prompts)
        assert tokens == want
        num_cached += cached
    host = engine.scheduler.pool.host
    assert sum(map(bool, num_cached)) >= 6, "nearly all but the first find something"
    assert (host is not None and host.num_loaded > 0) == from_host


@pytest.mark.parametrize(
    "dtype", ["int8", "int4", pytest.param("fp8", marks=pytest.mark.exhaustive)]
)
def test_quantized_pages_are_shared(dtype, make_engine):
    """With the scales (and zeros) that were found on write, which are part of a page."""
    settings = {
        "kv_cache_dtype": dtype,
        "num_gpu_blocks_override": 13,
        "admission": "fits",
        "kv_offload_gb": 0.01,
    }
    plain = make_engine(kv_cache_dtype=dtype, enable_prefix_caching=False)
    cached = make_engine(1, **settings)
    found = 0
    for prompts in turns():
        want, _ = run(plain, prompts)
        got, hits = run(cached, prompts)
        assert got == want
        found += sum(hits)
    assert found > 0 and cached.scheduler.pool.host.num_loaded > 0


def test_prefix_hit_logits_equal_cold_prompt(make_engine, monkeypatch):
    engine, seen = make_engine(), []
    logits = engine.runner.decoder.logits

    def watched(hidden):
        seen.append(logits(hidden))
        return seen[-1]

    monkeypatch.setattr(engine.runner.decoder, "logits", watched)
    prompt = list(range(5, 30))
    one = SamplingParams(max_tokens=1, temperature=0)
    run(engine, [prompt], one)
    _, (cached,) = run(engine, [prompt], one)
    assert cached == 24
    torch.testing.assert_close(seen[1], seen[0], atol=1e-4, rtol=1e-4)


def test_reset_makes_next_prompt_miss(make_engine):
    engine, prompt = make_engine(kv_offload_gb=0.01), list(range(5, 30))
    want, _ = run(engine, [prompt])
    engine.reset_prefix_cache()
    assert run(engine, [prompt]) == (want, [0])
    assert run(engine, [prompt]) == (want, [24])


def test_different_salts_share_no_pages(make_engine):
    engine, prompt = make_engine(), list(range(5, 30))
    want, _ = run(engine, [prompt], cache_salt="one")
    assert run(engine, [prompt], cache_salt="two") == (want, [0])
    assert run(engine, [prompt], cache_salt="one") == (want, [24])


def test_report_counts_queried_tokens(make_engine):
    engine, prompt = make_engine(), list(range(5, 30))
    found = []
    for _ in range(2):
        engine.add_request("r", prompt, GREEDY)
        engine.step()
        report = engine.report()
        found.append((report.num_prefix_queries, report.num_prefix_hits))
        assert engine.report().num_prefix_queries == 0, "each is reported once"
        while engine.has_work():
            engine.step()
    assert found == [(25, 0), (25, 24)]


def test_logits_call_saves_evicted_pages_to_host(make_engine):
    """They take pages outside of any step, and the request after them finds its own."""
    settings = {"num_gpu_blocks_override": 8, "admission": "fits", "kv_offload_gb": 0.01}
    engine, prompt = make_engine(**settings), list(range(5, 25))
    want, _ = run(engine, [prompt])
    engine.logits(list(range(100, 130)))
    assert run(engine, [prompt]) == (want, [16])
    assert engine.scheduler.pool.host.num_loaded == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_deadline_is_enforced_in_queue_and_while_running(make_engine, steps_in_flight):
    engine = make_engine(steps_in_flight, max_num_seqs=2)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    for name, timeout in (("slow", 5), ("free", None), ("queued", 3), ("done", 100)):
        one = SamplingParams(max_tokens=1) if name == "done" else params
        engine.add_request(name, [5, 6, 7], one, options=RequestOptions(timeout=timeout))
    ended = {}
    for second in range(200):
        make_engine.now[0] = second
        for event in engine.step():
            if event.finish_reason:
                ended[event.request_id] = (second, event.finish_reason, event.error)
        engine.scheduler.check_integrity()
        if not engine.has_work():
            break
    assert ended["queued"] == (3, "error", "deadline exceeded after 0 tokens")
    second, reason, error = ended["slow"]
    assert (second, reason) == (5, "error") and "after 5" in error or "after 4" in error
    assert ended["free"][1] == ended["done"][1] == "length"
    assert not engine._requests and engine.scheduler.pool.num_free == 100


def test_step_times_reach_itl_control(make_engine, monkeypatch):
    """From the launch, or the result before, to the result; by the engine's clock."""
    engine = make_engine(1, target_itl_ms=20.0)
    seen, launch = [], engine.workers.launch

    def slow(step):
        make_engine.now[0] += 0.25
        return launch(step)

    monkeypatch.setattr(engine.workers, "launch", slow)
    monkeypatch.setattr(
        engine.scheduler.pace, "observe", lambda load, seconds: seen.append((load, seconds))
    )
    engine.add_request("r", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_work():
        engine.step()
    assert [load.num_prompt_tokens for load, _ in seen] == [3, 0, 0]
    assert [load.num_decodes for load, _ in seen] == [0, 1, 1]
    assert [seconds for _, seconds in seen] == [0.5, 0.25, 0.25]


def bits(part):
    """A comparable view: float8 tensors do not support comparison."""
    return part.view(torch.uint8) if part.itemsize == 1 else part


@pytest.mark.parametrize(
    ("dtype", "num_heads"),
    [
        (torch.float32, 3),
        (torch.bfloat16, 3),
        (torch.int8, 3),
        (torch.int8, 1),
        (torch.float8_e4m3fn, 3),
    ],
)
def test_host_tier_restores_pages_bitwise(dtype, num_heads):
    """All layers, with the scales of 8-bit pages; more pages than one copy can move."""
    num_pages, num_slots = PAGES_AT_ONCE + 9, PAGES_AT_ONCE + 5
    caches = [
        PagedKv.zeros((num_pages, PAGE, num_heads, 8), dtype, torch.device("cpu")) for _ in range(2)
    ]
    for cache in caches:
        for part in (cache.k_pages, cache.v_pages):
            part.copy_(torch.randn(part.shape) * 9)
        for part in (cache.k_scales, cache.v_scales):
            if part is not None:
                part.copy_(torch.rand(part.shape))
    parts = [
        part
        for cache in caches
        for part in (cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales)
        if part is not None
    ]
    before = [bits(part).clone() for part in parts]
    copies = PageCopies(caches, num_slots, torch.device("cpu"))
    pages = torch.randperm(num_pages)[:num_slots].numpy()
    slots = torch.randperm(num_slots).numpy()
    copies.store(PageMoves(stored_pages=pages, stored_slots=slots))
    for part in parts:
        part[pages] = torch.zeros_like(part[pages])
    untouched = sorted(set(range(num_pages)) - set(pages.tolist()))
    # the first page comes back to another place, too
    back, again = untouched[0], slots[:1]
    copies.load(
        PageMoves(
            loaded_slots=np.array([*slots, *again]),
            loaded_pages=np.array([*pages, back]),
        )
    )
    for part, want in zip(parts, before, strict=True):
        got = bits(part)
        kept = [page for page in range(num_pages) if page != back]
        assert torch.equal(got[kept], want[kept])
        assert torch.equal(got[back], want[pages[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_page_copies_read_before_writing(dtype):
    """All are read before any is written: one is copied to, and its old contents elsewhere."""
    cache = PagedKv.zeros((9, PAGE, 3, 8), dtype, torch.device("cpu"))
    parts = [cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales]
    parts = [part for part in parts if part is not None]
    for part in parts:
        part.copy_(torch.randn(part.shape) * 9)
    before = [bits(part).clone() for part in parts]
    moves = PageMoves(copied_from=np.array([3, 5]), copied_to=np.array([5, 8]))
    copy_pages([cache], moves, torch.device("cpu"))
    for part, want in zip(parts, before, strict=True):
        assert torch.equal(bits(part), want[[0, 1, 2, 3, 4, 3, 6, 7, 5]])
