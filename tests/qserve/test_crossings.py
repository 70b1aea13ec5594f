"""Combinations of features: random requests on random engines get what each gets alone.

A crossing has a model. A seed gives the engine's settings and the requests, together: drafts,
adapters, grammars, beams, embeddings, too few KV pages, pages from the host or other engines,
aborts and deadlines. Everything is in float32 without 8-bit inputs: a step of another shape could
round one of those differently.
"""

import numpy as np
import pytest

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.kv_cache import state_snapshots
from tests.adapters import write_adapter
from tests.qserve.crossings import DRAFTERS, NUM_ADAPTERS, Alone, draw, run
from tests.qserve.speculation.docs_heads import write_docs_head
from tests.tiny_families import ROWS, STATES, TINY_FAMILIES, WITHOUT_ADAPTERS

SLACK = 1e-4  # of a log probability
exhaustive = pytest.mark.exhaustive
# model -> seeds of the default run. They fail where requests find another adapter's pages, where
# counts for penalties are lost with the pages, where refused drafts count as computed, and where
# beams write to shared pages.
QUICK = {"docs": (11, 13, 54), "qwen3_5": (11, 13)}
SEEDS, SEEDS_OF_DOCS = range(2), (*range(40), 54)
OTHER_SEEDS = {"docs": SEEDS_OF_DOCS, "qwen3_5": range(24), "deepseek_v4": range(16)}
CASES = [
    pytest.param(model, seed, marks=() if seed in QUICK.get(model, ()) else exhaustive)
    for model in ("docs", "w4a16", *(name for name in TINY_FAMILIES if name not in ROWS))
    for seed in OTHER_SEEDS.get(model, SEEDS)
]


@pytest.fixture(scope="module")
def crossing(request, docs_5m, tiny_model, tmp_path_factory):
    """model -> its folder, adapters, arguments of `draw`, and the engine to compare with."""
    made = {}

    def make(model):
        if model not in made:
            has_text = model in ("docs", "w4a16")
            if model == "w4a16":
                folder = request.getfixturevalue("quantized_5m")
            else:
                folder = docs_5m if has_text else tiny_model(model)
            drafters = DRAFTERS
            if model == "docs":
                heads = str(docs_5m.parent / "docs-5m-eagle3")
                drafters += (
                    {"method": "draft_model", "model": str(docs_5m)},
                    {"method": "eagle3", "model": heads},
                )
            adapters = []
            if model not in WITHOUT_ADAPTERS:
                at = tmp_path_factory.mktemp("adapters")
                adapters = [
                    str(write_adapter(folder if model != "w4a16" else docs_5m, at / str(i), seed=i))
                    for i in range(NUM_ADAPTERS)
                ]
            limits = {
                "vocab_size": 8192 if has_text else 512,
                "has_forms": has_text,
                "has_adapters": bool(adapters),
                "drafters": drafters,
            }
            alone = {each: Alone(folder, has_adapters=each) for each in {False, bool(adapters)}}
            made[model] = folder, adapters, limits, alone
        return made[model]

    return make


@pytest.mark.parametrize(("model", "seed"), CASES)
def test_mixed_requests_equal_separate_requests(model, seed, crossing, tmp_path, monkeypatch):
    if model in STATES:  # snapshots of a few tokens are worth while
        monkeypatch.setattr(state_snapshots, "SPACING", 8)
        monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    folder, adapters, limits, alone = crossing(model)
    if model == "docs" and seed not in QUICK[model]:  # heads that draft in one pass as well
        heads = [
            {"method": kind, "model": str(write_docs_head(tmp_path / kind, kind))}
            for kind in ("dflash", "peagle")
        ]
        limits = {**limits, "drafters": (*limits["drafters"], *heads)}
    drawn = draw(seed, **limits)
    if model == "deepseek_v4":  # windows of 4 tokens are within pages
        drawn.settings["block_size"] = max(4, drawn.settings["block_size"])
    if model in STATES_ALONE and REFUSED_WITHOUT_ATTENTION & drawn.settings.keys():
        with pytest.raises(InputError, match="which has no attention"):
            run(drawn, folder, tmp_path)
        return
    found, aborted, refused = run(drawn, folder, tmp_path, adapters)
    assert len(found) + len(refused) == len(drawn.requests)
    assert all(any(word in each for word in REFUSALS) for each in refused), refused
    engine = alone["enable_lora" in drawn.settings]
    for asked in drawn.requests:
        if asked.name in found:
            got, want = found[asked.name], engine.answer(asked, adapters)
            is_cut = asked.name in aborted or "deadline exceeded" in got.end[2]
            if is_cut:
                assert got.tokens == want.tokens[: len(got.tokens)], asked
            else:
                assert_same(asked, got, want)
            assert got.num_cached % drawn.settings["block_size"] == 0
            assert got.num_cached < len(asked.prompt)


STATES_ALONE = ("mamba", "falcon_mamba", "mamba2")
REFUSED_WITHOUT_ATTENTION = {"kv_offload_gb", "kv_transfer_config"}
REFUSALS = (
    "KV pages",
    "expected at most",  # beams together with max_num_seqs
    "no token is allowed",
)


def assert_same(asked, got, want):
    assert (got.tokens, got.end) == (want.tokens, want.end), asked
    assert_same_logprobs(asked, got.logprobs, want.logprobs)
    assert_same_logprobs(asked, got.prompt_logprobs or (), want.prompt_logprobs or ())
    vectors = [np.frombuffer(each.pooled, "<f4") for each in (got, want)]
    np.testing.assert_allclose(*vectors, atol=1e-3, rtol=1e-3, err_msg=str(asked))
    for ours, theirs in zip(got.beams, want.beams, strict=True):
        assert ours.token_ids == theirs.token_ids and ours[3:6] == theirs[3:6], asked
        # a score is the sum of so many log probabilities, divided by a power of their number
        exponent = 1 - asked.options["beam_search"]["length_penalty"]
        slack = SLACK * len(ours.token_ids) ** exponent
        assert ours.score == pytest.approx(theirs.score, abs=slack, rel=1e-5), asked
        assert_same_logprobs(asked, ours.logprobs, theirs.logprobs)


def assert_same_logprobs(asked, got, want):
    for ours, theirs in zip(got, want, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs, asked  # the first of a prompt
            continue
        assert ours.logprob == pytest.approx(theirs.logprob, abs=SLACK, rel=1e-5), asked
        values = ours.top_logprobs, theirs.top_logprobs
        np.testing.assert_allclose(*values, atol=SLACK, rtol=1e-5, err_msg=str(asked))


def test_random_draws_cover_required_combinations(docs_5m):
    """Or the crossings would test less than they say."""
    settings, params, request_options = set(), set(), set()
    for seed in SEEDS_OF_DOCS:
        drawn = draw(seed, vocab_size=8192)
        settings |= drawn.settings.keys()
        for asked in drawn.requests:
            params |= asked.params.keys()
            request_options |= asked.options.keys()
            asked.sampling()
    assert settings <= EngineConfig.__dataclass_fields__.keys()
    assert {"kv_transfer_config", "speculative_config", "enable_lora", "kv_offload_gb"} <= settings
    assert {"structured_outputs", "bad_words", "prompt_logprobs", "min_tokens"} <= params
    assert {
        "pooling",
        "beam_search",
        "lora",
        "timeout",
        "cache_salt",
        "priority",
    } <= request_options
