"""Models whose layers have states begin from copies of them: the tokens are those without."""

import json
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.kv_cache import state_snapshots
from qserve.engine.kv_cache.prefix_cache import extend_keys, root_key
from qserve.engine.runner import layer_caches
from qserve.library.beam_outputs import sampling_params
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp

FAMILIES = ["qwen3_next", "qwen3_5", "lfm2", "granite_hybrid", "falcon_h1"]
FAMILIES += ["nemotron_h", "nemotron_h_moe", "bamba", "kimi_linear", "minimax", "lfm3"]
FAMILIES += ["ling_3", "inkling"]
FAMILIES += ["olmo_hybrid", "mamba", "falcon_mamba", "mamba2", "jamba"]
WITHOUT_PAGES = ("mamba", "falcon_mamba", "mamba2")  # no layer has attention
MODES = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 11, "max_num_seqs": 4},
    "pushed out": {"num_gpu_blocks_override": 20, "admission": "fits", "max_num_seqs": 4},
    "few copies": {"num_state_snapshots": 4, "max_num_seqs": 3},
}
EVICTED = {
    **{"num_state_snapshots": 2, "num_gpu_blocks_override": 40, "max_num_seqs": 3},
    "kv_offload_gb": 0.01,
}
# The others where there is time.
FEW = {
    ("qwen3_5", "chunked", 1),
    ("qwen3_5", "pushed out", 1),
    ("qwen3_next", "few copies", 0),
    ("lfm2", "chunked", 1),
    ("granite_hybrid", "few copies", 1),
    ("falcon_h1", "pushed out", 1),
    ("kimi_linear", "pushed out", 1),
    ("minimax", "chunked", 0),
    ("olmo_hybrid", "pushed out", 1),
    ("mamba", "pushed out", 1),
    ("jamba", "chunked", 1),
    ("inkling", "pushed out", 1),
}
CASES = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.exhaustive)
    for case in product(FAMILIES, MODES, (0, 1))
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


def make_engine(folder, steps_in_flight=0, **settings):
    settings = {"max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 200} | settings
    config = EngineConfig(model=str(folder), device="cpu", **settings)
    engine = Engine(config, steps_in_flight=steps_in_flight)
    for cache in engine.runner.caches:
        for tensor in cache.slot_tensors:  # what no request has written
            tensor.fill_(torch.nan)
    copies = engine.runner.layer_caches.state_copies
    if copies is not None:  # memory of an earlier engine may have its states
        copies._slots_SF.fill_(255)  # NaN
    return engine


def chats(engine, seed=5, loras=(None,)):
    """Output tokens of chats with common starts, chat by chat with another of these adapters.

    And how often pages ran out, and how many tokens of prompts were not computed.
    """
    rng = random.Random(seed)
    starts = [[rng.randrange(3, 512) for _ in range(n)] for n in (18, 29)]
    found, prompts, num_cached, num_preempted = {}, {}, 0, 0
    for turn in range(3):
        for chat in range(6):
            name = f"{chat} {turn}"
            before = f"{chat} {turn - 1}"
            own = [rng.randrange(3, 512) for _ in range(rng.randint(1, 6))]
            start = [*prompts[before], *found[before]] if turn else starts[chat % 2]
            prompts[name], found[name] = [*start, *own], []
            params = SamplingParams(
                max_tokens=rng.randint(3, 14), temperature=chat % 3 / 2, seed=chat, ignore_eos=True
            )
            options = RequestOptions(lora=loras[chat % len(loras)])
            engine.add_request(name, prompts[name], params, options=options)
        while engine.has_work():
            for event in engine.step():
                assert event.finish_reason != "error", event.error
                found[event.request_id] += event.token_ids
                if event.finish_reason is not None:
                    num_cached += event.facts.num_cached
            engine.scheduler.check_integrity()
            num_preempted += engine.report().num_preempted
    assert engine.scheduler.states.num_free == engine.scheduler.states.num_slots
    return found, num_preempted, num_cached


@pytest.fixture(scope="module")
def without(tiny_model):
    """A family's tokens where every prompt is computed."""
    made = {}

    def make(name):
        if name not in made:
            made[name], *counts = chats(make_engine(tiny_model(name), num_state_snapshots=0))
            assert counts == [0, 0]
        return made[name]

    return make


@pytest.mark.parametrize(("name", "mode", "steps_in_flight"), CASES)
def test_prefix_hits_give_same_tokens(tiny_model, without, name, mode, steps_in_flight):
    engine = make_engine(tiny_model(name), steps_in_flight, **MODES[mode])
    found, num_preempted, num_cached = chats(engine)
    assert found == without(name)
    assert bool(num_preempted) == (mode == "pushed out")
    assert num_cached > (20 if mode == "few copies" else 200)


@pytest.mark.parametrize("wrong", ["saved_to", "restored_to", "stored_to", "loaded_to"])
def test_missing_snapshot_copy_is_detected(tiny_model, without, monkeypatch, wrong):
    """By NaN, which no request has written over."""
    copy = layer_caches.copy_states

    def copies_less(caches, moves, device, host):
        none = np.zeros(0, np.int64)
        without = {wrong: none, wrong.replace("_to", "_from"): none}
        copy(caches, replace(moves, **without), device, host)

    monkeypatch.setattr(layer_caches, "copy_states", copies_less)
    with pytest.raises(AssertionError, match="NaN|=="):
        found, *_ = chats(make_engine(tiny_model("qwen3_5"), **EVICTED))
        assert found == without("qwen3_5")


@pytest.mark.parametrize(
    ("name", "in_flight"),
    [
        ("qwen3_5", 1),
        *(
            pytest.param(name, number, marks=pytest.mark.exhaustive)
            for name in FAMILIES
            for number in (0, 1)
            if (name, number) != ("qwen3_5", 1) and name not in WITHOUT_PAGES
        ),
    ],
)
def test_host_tier_snapshots(tiny_model, without, name, in_flight):
    """Few copies and pages fit on the device: most come back from the host."""
    engine = make_engine(tiny_model(name), in_flight, **EVICTED)
    loaded, load = [], engine.runner.layer_caches.state_copies.load

    def counted(moves):
        loaded.extend(moves.loaded_slots)
        load(moves)

    engine.runner.layer_caches.state_copies.load = counted
    found, _, num_cached = chats(engine)
    assert found == without(name)
    assert len(loaded) > 3 and num_cached > 200
    assert engine.scheduler.pool.host.num_loaded > 5


def tokens_of(engine, name, prompt, **options):
    """Tokens of a request, how many of its prompt were cached, and how many rows were computed."""
    found, rows, launch = [], [], engine.workers.launch

    def counted(step):
        rows.append(step.num_tokens)
        return launch(step)

    engine.workers.launch = counted
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    engine.add_request(name, prompt, params, **options)
    while engine.has_work():
        for event in engine.step():
            assert event.finish_reason != "error", event.error
            found += event.token_ids
            cached = event.facts.num_cached
    engine.scheduler.check_integrity()
    engine.workers.launch = launch
    return found, cached, sum(rows)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("qwen3_next", ""),
        ("nemotron_h", ""),
        ("qwen3_5", "mtp"),
        pytest.param("qwen3_5", "ngram", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", "mtp", marks=pytest.mark.exhaustive),
    ],
)
def test_evicted_prefix_returns_from_host(tiny_model, tmp_path, name, drafter):
    """Only the tokens after its last full page are computed again."""
    folder, settings = tiny_model(name), {}
    if drafter:
        drafts = {"method": drafter, "num_speculative_tokens": 3, "adaptive": False}
        settings = {"speculative_config": json.dumps(drafts)}
    if drafter == "mtp":
        folder = make_hybrid_mtp(tmp_path / "mtp", name, 0.9)
    prompt = list(range(5, 46))  # 10 pages and a token
    want, _, num_rows = tokens_of(make_engine(folder, num_state_snapshots=0), "0", prompt)
    assert num_rows == len(prompt) + 5
    engine = make_engine(folder, **{**EVICTED, "num_gpu_blocks_override": 24}, **settings)
    found, cached, rows_before = tokens_of(engine, "0", prompt)
    assert found == want and cached == 0
    for number in range(4):
        tokens_of(engine, "0", [100 + number, *prompt])
    keys: list[bytes] = []
    extend_keys(keys, prompt, page_size=4, last=root_key())
    snapshots = engine.scheduler.snapshots
    assert not engine.scheduler.pool.match(keys) and keys[-1] not in snapshots._slots
    assert snapshots.has(keys[-1])
    found, cached, num_rows = tokens_of(engine, "0", prompt)
    assert found == want and cached == 40
    assert num_rows == rows_before - 40


def test_beams_start_from_snapshot_of_host(tiny_model):
    """Each beam continues from the state that comes back from the host."""
    params = BeamSearchParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True)
    prompt = list(range(5, 46))

    def beams(engine):
        options = RequestOptions(beam_search=params)
        engine.add_request("0", prompt, sampling_params(params), options=options)
        while engine.has_work():
            for event in engine.step():
                assert event.finish_reason != "error", event.error
                found, cached = event.beams, event.facts.num_cached
        engine.scheduler.check_integrity()
        return [list(each.token_ids) for each in found], [each.score for each in found], cached

    want, scores, _ = beams(make_engine(tiny_model("qwen3_next"), num_state_snapshots=0))
    scores = pytest.approx(scores, rel=1e-5, abs=2e-5)
    engine = make_engine(tiny_model("qwen3_next"), **EVICTED)
    assert beams(engine) == (want, scores, 0)
    for number in range(5):
        tokens_of(engine, "0", [100 + number, *prompt])
    loaded = engine.scheduler.snapshots.host.num_loaded
    assert beams(engine) == (want, scores, 40)
    assert engine.scheduler.snapshots.host.num_loaded == loaded + 1


def test_snapshot_count_follows_memory(tiny_model):
    """With pages they fill what there is."""
    free = {"num_gpu_blocks_override": None, "max_num_seqs": 4}
    engine = make_engine(tiny_model("qwen3_5"), cpu_kv_cache_memory=0.0003, **free)
    runner = engine.runner
    num_slots = 4 + runner.num_snapshots
    assert num_slots > 4 and runner.caches[0].memory_PHKV.shape[0] == num_slots
    pages = engine.scheduler.pool.num_pages * runner.bytes_per_page
    held, room = pages + num_slots * runner.bytes_per_state, 0.0003 * 2**30
    assert room - runner.bytes_per_state < held <= room


def test_too_little_memory_on_the_host_is_refused(tiny_model):
    with pytest.raises(InputError, match="kv-offload-gb: .* do not hold two snapshots"):
        make_engine(tiny_model("qwen3_5"), kv_offload_gb=0.00001)
