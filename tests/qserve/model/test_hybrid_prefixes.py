"""Models whose layers have states begin from copies of them: the tokens are those without."""

import random
from itertools import product

import pytest
import torch

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.kv_cache import state_snapshots
from qserve.engine.runner import model_runner
from qserve.params.sampling_params import SamplingParams

FAMILIES = ["qwen3_next", "qwen3_5", "lfm2", "granite_hybrid", "falcon_h1"]
FAMILIES += ["nemotron_h", "nemotron_h_moe", "bamba", "kimi_linear", "minimax"]
MODES = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 11, "max_num_seqs": 4},
    "pushed out": {"num_gpu_blocks_override": 20, "admission": "fits", "max_num_seqs": 4},
    "few copies": {"num_state_snapshots": 4, "max_num_seqs": 3},
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
}
CASES = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.exhaustive)
    for case in product(FAMILIES, MODES, (0, 1))
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "LEAST_GAIN", 4)


def make_engine(folder, steps_in_flight=0, **settings):
    settings = {"max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 200} | settings
    config = EngineConfig(model=str(folder), device="cpu", **settings)
    engine = Engine(config, steps_in_flight=steps_in_flight)
    for cache in engine.runner.caches:
        for tensor in cache.slot_tensors:  # what no request has written
            tensor.fill_(torch.nan)
    return engine


def chats(engine, seed=5):
    """Output tokens of chats with common starts.

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
            engine.add_request(name, prompts[name], params)
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
def test_the_same_tokens(tiny_model, without, name, mode, steps_in_flight):
    engine = make_engine(tiny_model(name), steps_in_flight, **MODES[mode])
    found, num_preempted, num_cached = chats(engine)
    assert found == without(name)
    assert bool(num_preempted) == (mode == "pushed out")
    assert num_cached > (20 if mode == "few copies" else 200)


@pytest.mark.parametrize("wrong", ["saved_to", "restored_to"])
def test_a_copy_that_is_not_made_is_seen(tiny_model, without, monkeypatch, wrong):
    """By NaN, which no request has written over."""
    copy = model_runner.copy_states

    def copies_less(caches, moves, device):
        others = {"saved_from", "saved_to", "restored_from", "restored_to"} - {
            wrong,
            wrong.replace("_to", "_from"),
        }
        kept = {name: getattr(moves, name) for name in others}
        copy(caches, state_snapshots.StateMoves(**kept), device)

    monkeypatch.setattr(model_runner, "copy_states", copies_less)
    with pytest.raises(AssertionError, match="NaN|=="):
        found, *_ = chats(make_engine(tiny_model("qwen3_5")))
        assert found == without("qwen3_5")
