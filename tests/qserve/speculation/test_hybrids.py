"""Speculation on models with states: tokens are those without it, and no rejected row is kept.

Float32 on the CPU. Chats with common starts, so that requests begin from copies of states; greedy
and sampled, in chunks, with too few pages, with a step in flight.
"""

import json
import random
import shutil
from itertools import product

import pytest

from qserve.engine.kv_cache import state_snapshots
from qserve.engine.runner.layer_caches import CoveredTokens
from qserve.model.blocks.states.delta_net import DeltaNet
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.test_hybrid_prefixes import FAMILIES, MODES, chats, make_engine
from tests.qserve.speculation import table_drafter, traces
from tests.qserve.speculation.drafters import Oracle
from tests.tiny_families import TINY_FAMILIES

DRAFTERS = {
    "suffix": {"method": "suffix"},
    "oracle": {"method": "ngram"},
    "device": {"method": "draft_model", "model": "unused"},
}
# (family, mode, drafter, drafts, steps in flight)
FEW = {
    ("qwen3_5", "pushed out", "device", 2, 1),
    ("qwen3_next", "chunked", "oracle", 5, 0),
    ("lfm2", "chunked", "device", 3, 1),
    ("granite_hybrid", "few copies", "device", 3, 1),
}
ALL = {
    (name, mode, drafter, count, int(drafter == "device"))
    for name, mode, (drafter, count) in product(
        FAMILIES, MODES, (("device", 3), ("oracle", 2), ("device", 1), ("suffix", 2))
    )
}
CASES = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.exhaustive)
    for case in sorted(FEW | ALL)
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


@pytest.fixture(scope="module")
def without(tiny_model):
    """folder or family -> the tokens without speculation, and whole texts by request."""
    made = {}

    def make(name):
        if name not in made:
            engine = make_engine(name if "/" in str(name) else tiny_model(name))
            prompts, add = {}, engine.add_request

            def add_request(request_id, prompt, params, **others):
                prompts[request_id] = list(prompt)
                add(request_id, prompt, params, **others)

            engine.add_request = add_request
            found, *_ = chats(engine)
            made[name] = found, {each: prompts[each] + found[each] for each in found}
        return made[name]

    return make


def speculating(
    folder, monkeypatch, texts, drafter, count, in_flight, make=make_engine, vocab=512, **settings
):
    """An engine whose drafter knows the texts, unless it has a method of its own."""
    if drafter == "oracle":
        monkeypatch.setattr(
            "qserve.speculation.speculation.build_host_drafter",
            lambda config: Oracle(texts, 1, vocab),
        )
    if drafter == "device":
        table_drafter.install(monkeypatch, tuple(texts.values()))
    config = {"num_speculative_tokens": count, "adaptive": False, **DRAFTERS[drafter]}
    engine = make(folder, in_flight, speculative_config=json.dumps(config), **settings)
    engine.runner.layer_caches.covered.covered_P.fill_(-1000)  # what no request has written
    return engine


@pytest.mark.parametrize(("name", "mode", "drafter", "count", "in_flight"), CASES)
def test_drafts_do_not_change_tokens(
    tiny_model, without, monkeypatch, name, mode, drafter, count, in_flight
):
    want, texts = without(name)
    engine = speculating(
        tiny_model(name), monkeypatch, texts, drafter, count, in_flight, **MODES[mode]
    )
    verified, observe = [], engine.scheduler.speculation.observe

    def observed(num_drafts, num_accepted):
        verified.append((num_drafts, num_accepted))
        observe(num_drafts, num_accepted)

    engine.scheduler.speculation.observe = observed
    found, num_preempted, num_cached = chats(engine)
    assert found == want
    if drafter == "suffix":  # it has seen the texts then
        assert chats(engine)[0] == want
    assert any(accepted for _, accepted in verified)
    assert any(accepted < drafts for drafts, accepted in verified)
    assert num_cached > (20 if mode == "few copies" else 200)
    assert mode != "pushed out" or num_preempted


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory, docs_5m):
    """family -> folder of a tiny model with a tokenizer, as grammars need it"""
    made = {}

    def make(family):
        if family not in made:
            name, extra = TINY_FAMILIES[family]
            folder = tmp_path_factory.mktemp("text") / family
            made[family] = make_tiny(folder, name, {**extra, "vocab_size": 8192})
            for file in docs_5m.glob("token*"):
                shutil.copy(file, folder)
        return made[family]

    return make


def compare_traces(folder, monkeypatch, seed, drafter, count, in_flight, kinds=None, **settings):
    """Requests of all kinds get what they get without speculation; some are aborted."""
    requests = traces.make_requests(seed, 14, kinds or tuple(traces.KINDS))
    aborted = [name for name, _, _ in requests[seed % 5 :: 7]]
    want = traces.run(traces.make_engine(folder), requests, seed)
    texts = {name: prompt + want[name][0] for name, prompt, _ in requests}
    engine = speculating(
        *(folder, monkeypatch, texts, drafter, count, in_flight, traces.make_engine, 1000),
        **settings,
    )
    found = traces.run(engine, requests, seed + 1, aborted)
    for name in aborted:
        tokens = found.pop(name)[0]
        assert tokens == want.pop(name)[0][: len(tokens)]
    assert found == want
    engine.scheduler.check_integrity()
    verifies, _, *accepted = engine.scheduler.speculation.take_counts()
    assert 0 < accepted[0] < verifies


@pytest.mark.parametrize(
    ("drafter", "in_flight"),
    [("device", 1), pytest.param("oracle", 0, marks=pytest.mark.exhaustive)],
)
def test_all_kinds_of_requests(with_tokenizer, monkeypatch, drafter, in_flight):
    """Grammars, penalties, stops and minimal lengths, which end or shorten verifications."""
    compare_traces(with_tokenizer("qwen3_5"), monkeypatch, 5, drafter, 3, in_flight)


@pytest.mark.exhaustive
def test_outputs_of_one_prompt_share_state_snapshot(tiny_model, without, monkeypatch):
    """They start from one copy of the state, and part."""
    _, texts = without("qwen3_5")
    prompt, found = list(texts["0 1"][:20]), []
    for drafter in ("", "oracle"):
        folder, settings = tiny_model("qwen3_5"), {"max_num_seqs": 4}
        with monkeypatch.context() as patch:
            given = {f"{n}_a": prompt + list(found[0][f"{n}_a"]) for n in range(4)} if found else {}
            engine = (
                speculating(folder, patch, given, drafter, 3, 0, **settings)
                if drafter
                else make_engine(folder, **settings)
            )
            outputs = {f"{n}_a": [] for n in range(4)}
            for number, name in enumerate(outputs):
                params = SamplingParams(max_tokens=16, temperature=1, seed=number, ignore_eos=True)
                engine.add_request(name, prompt, params, group="a")
            while engine.has_work():
                for event in engine.step():
                    outputs[event.request_id] += event.token_ids
        found.append(outputs)
    assert found[0] == found[1]
    assert len({tuple(output) for output in found[0].values()}) == 4


def random_settings(rng):
    """Settings of an engine that requests of up to 96 tokens fit into."""
    most = rng.randint(2, 6)
    few = {"num_gpu_blocks_override": rng.randint(40, 70), "admission": "fits"}
    return {
        "max_num_seqs": most,
        "max_num_batched_tokens": most + rng.choice([3, 9, 40]),
        "num_state_snapshots": rng.choice([0, 1, 2, 5, 16]),
        "block_size": 4,
        **(few if rng.random() < 0.4 else {}),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24))
def test_random_engines(with_tokenizer, monkeypatch, seed):
    rng = random.Random(seed)
    family = rng.choice(["qwen3_5", "qwen3_next", "lfm2", "granite_hybrid", "falcon_h1"])
    drafter, in_flight = rng.choice([("device", 0), ("device", 1), ("device", 1), ("oracle", 0)])
    folder, count, settings = with_tokenizer(family), rng.randint(1, 6), random_settings(rng)
    compare_traces(folder, monkeypatch, seed, drafter, count, in_flight, **settings)


@pytest.mark.parametrize(
    "drafter", ["device", pytest.param("oracle", marks=pytest.mark.exhaustive)]
)
def test_wrong_state_after_rejected_draft_changes_tokens(tiny_model, without, monkeypatch, drafter):
    """One accepted row more or less than there are in the state changes the tokens."""
    want, texts = without("qwen3_5")
    advance = CoveredTokens.advance_

    for more in (1, -1):

        def advance_wrongly(self, batch, more=more):
            made = advance(self, batch)
            made.lacking_R[made.lacking_R > 1] += more
            return made

        with monkeypatch.context() as patch:
            patch.setattr(CoveredTokens, "advance_", advance_wrongly)
            engine = speculating(
                tiny_model("qwen3_5"), patch, texts, drafter, 3, int(drafter == "device")
            )
            with pytest.raises(AssertionError):
                found, *_ = chats(engine)
                assert found == want


def test_stale_state_slot_changes_tokens(tiny_model, without, monkeypatch):
    """A slot's number of tokens must be copied with its states."""
    want, texts = without("qwen3_5")
    monkeypatch.setattr(CoveredTokens, "slot_tensors", ())
    engine = speculating(tiny_model("qwen3_5"), monkeypatch, texts, "device", 3, 1)
    with pytest.raises(AssertionError):
        found, *_ = chats(engine)
        assert found == want


def test_draft_state_memory_is_logged(tiny_model, caplog):
    """Slots have the inputs of newest rows; the log says how many bytes these take."""
    plain = make_engine(tiny_model("qwen3_5"), max_num_seqs=4).runner
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    with caplog.at_level("INFO"):
        runner = make_engine(
            tiny_model("qwen3_5"), max_num_seqs=4, speculative_config=config
        ).runner
    held = sum(tensor.nbytes for cache in runner.caches for tensor in cache.slot_tensors)
    assert runner.bytes_of_states == held > plain.bytes_of_states
    line = next(text for text in caplog.messages if text.startswith("States: 4 slots"))
    assert line.endswith(" of them for drafts")
    # 2 layers; 4 more inputs of a convolution, 8 rows of keys, values, b and a, in float32
    mixers = [layer.attention for layer in runner.decoder.layers]
    shape, slots = next(each.shape for each in mixers if isinstance(each, DeltaNet)), 4 + 32
    row = shape.keys + shape.values + 2 * shape.value_heads
    more = 2 * slots * (4 * shape.channels + 8 * row) * 4
    assert runner.bytes_of_states - plain.bytes_of_states == more
