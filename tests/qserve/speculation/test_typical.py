"""Typical acceptance: Medusa's rule on a small vocabulary, and what an engine makes of it."""

import json
import math

import pytest
import torch

from formats.errors import InputError
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import SampleRow
from qserve.config import EngineConfig
from qserve.speculation import drafter as drafters
from qserve.speculation import rejection, typical
from qserve.speculation.acceptance import Verify
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.rejection import draw_verify, judge_of
from tests.qserve.speculation.drafters import ERRING
from tests.qserve.speculation.traces import make_engine, make_requests, run

V = 8
SHARES = {
    "sure": [0.9, 0.05, 0.03, 0.01, 0.005, 0.003, 0.001, 0.001],
    "two": [0.48, 0.44, 0.05, 0.03, 0, 0, 0, 0],
    "flat": [1 / 8] * 8,
    "a long tail": [0.3, 0.16, 0.12, 0.1, 0.09, 0.085, 0.075, 0.07],
    "nearly flat": [0.2, 0.16, 0.14, 0.12, 0.11, 0.1, 0.09, 0.08],
}


def make_config(**keys):
    return SpeculativeConfig.of({"method": "ngram", **keys}, "typical")


def passing(shares, config, *, temperature=1.0, top_k=0):
    """Which tokens pass as the first draft of a chunk of two."""
    row = SampleRow(temperature=temperature, top_k=top_k, position=5)
    words_SP = SampleSettings.of([row]).words_SP.repeat(2 * V, 1)
    words_SP[:, rejection.SEED] = torch.arange(2 * V) * 7919
    settings = SampleSettings.of_words(words_SP.numpy(), torch.zeros(0).long().numpy())
    logits = torch.tensor(shares).log()
    verify = Verify(
        first_D=torch.arange(V) * 2,
        count_D=torch.full((V,), 2),
        drafts_S=torch.stack([torch.arange(V), torch.zeros(V).long()], 1).flatten(),
        most=2,
    )
    samples, accepted = draw_verify(
        logits.expand(2 * V, V), settings, None, verify, None, judge_of(config)
    )
    first = samples.tokens_S.view(V, 2)[:, 0]
    assert (first == torch.arange(V))[accepted == 1].all()
    return {token for token in range(V) if accepted[token] == 1}


def by_hand(shares, threshold, alpha, **wrong):
    entropy = -sum(p * math.log(p, wrong.get("base", math.e)) for p in shares if p)
    both = threshold, alpha * math.exp(-entropy)
    limit = wrong.get("of_both", min)(both)
    return {token for token, p in enumerate(shares) if p > limit}


LIMITS = [(0.09, 0.3), (0.3, 0.55), (0.125, 1.0), (0.02, 0.9)]


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize(("threshold", "alpha"), LIMITS)
def test_typical_acceptance_rule(name, threshold, alpha):
    keys = {"posterior_threshold": threshold, "posterior_alpha": alpha}
    assert passing(SHARES[name], make_config(**keys)) == by_hand(SHARES[name], threshold, alpha)


@pytest.mark.parametrize("wrong", [{"base": 2}, {"of_both": max}, {"of_both": lambda b: b[0]}])
def test_wrong_rules_fail_comparison(wrong):
    cases = [(shares, *limits) for shares in SHARES.values() for limits in LIMITS]
    assert any(by_hand(*case) != by_hand(*case, **wrong) for case in cases)


def test_defaults_equal_medusa_and_limit_is_exclusive():
    for shares in SHARES.values():
        assert passing(shares, make_config()) == by_hand(shares, 0.09, 0.3)
    config = make_config(posterior_threshold=0.25, posterior_alpha=1.0)
    p = torch.tensor([[0.25, 0.75], [0.25 + 2**-20, 0.75 - 2**-20]])
    seeds, is_draft = torch.arange(2), torch.ones(2, dtype=torch.bool)
    _, passes = typical.judge(p, None, torch.zeros(2).long(), is_draft, seeds, seeds, config)
    assert passes.tolist() == [False, True]


def test_rule_uses_temperature_and_filters():
    shares = SHARES["a long tail"]
    config = make_config(posterior_threshold=0.3)
    assert passing(shares, config, temperature=0) == {0}
    hot = torch.tensor(shares).pow(0.5)
    assert passing(shares, config, temperature=2.0) == by_hand(hot / hot.sum(), 0.3, 0.3)
    two = [0.3 / 0.46, 0.16 / 0.46] + [0.0] * 6
    assert passing(shares, config, top_k=2) == by_hand(two, 0.3, 0.3) == {0, 1}
    assert len(passing(shares, config)) == 8


def test_rejected_position_is_drawn_from_model():
    """Also the refused draft itself, as the draw without drafts would be."""
    D, p = 40_000, torch.tensor(SHARES["sure"])
    seeds, is_draft = torch.arange(D) * 7919, torch.ones(D, dtype=torch.bool)
    drafts = torch.full((D,), 5)
    tokens, passes = typical.judge(
        *(p.expand(D, V), None, drafts, is_draft, seeds, torch.full((D,), 5)), make_config()
    )
    assert not passes.any()
    counts = torch.bincount(tokens, minlength=V) / D
    assert float((counts - p).abs().sum() / 2) < 0.006
    _, passes = typical.judge(
        *(p.expand(D, V), None, drafts * 0, ~is_draft, seeds, torch.full((D,), 5)), make_config()
    )
    assert not passes.any()


def counts_of(docs_5m, requests, acceptance, **keys):
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(docs_5m), **keys}
    settings = {"speculative_config": json.dumps(config), "spec_acceptance": acceptance}
    engine = make_engine(docs_5m, 1, **settings)
    found = run(engine, requests)
    return found, engine.scheduler.speculation.take_counts()


@pytest.mark.exhaustive
def test_greedy_requests_keep_their_text(docs_5m, monkeypatch):
    """With penalties, log probabilities, grammars and a step in flight, next to sampled ones."""
    monkeypatch.setitem(drafters.DEVICE_DRAFTERS, "draft_model", ERRING)
    kinds = ("greedy", "penalties", "logprobs", "form, penalties", "hot", "form")
    requests = make_requests(8, 6, kinds)
    greedy = [request for request in requests if not request[2].temperature]
    want = run(make_engine(docs_5m), greedy)
    found, (verifies, _, *accepted) = counts_of(docs_5m, requests, "typical")
    assert {name: found[name] for name in want} == want
    assert {end[0] for _, _, end in found.values()} <= {"length", "stop"}
    assert 0 < accepted[0] < verifies


@pytest.mark.exhaustive
def test_typical_acceptance_accepts_more_drafts(docs_5m):
    """The likeliest token has a share of at least exp(-entropy), so it always passes."""
    sampled = make_requests(9, 8, ("sampled", "hot"))
    shares = {}
    for acceptance in ("exact", "typical"):
        keys = {"draft_sample_method": "greedy"}
        _, (verifies, _, *accepted) = counts_of(docs_5m, sampled, acceptance, **keys)
        shares[acceptance] = accepted[0] / verifies
    assert shares["typical"] == 1 > shares["exact"] > 0


@pytest.mark.parametrize(
    ("keys", "acceptance", "message"),
    [
        ({"posterior_alpha": 0.2}, "exact", "requires typical acceptance, found exact"),
        ({"posterior_threshold": 0.2}, "rejection", "found rejection.*spec-acceptance typical"),
        ({"posterior_alpha": 1.5}, "typical", "expected 0 to 1, found 1.5"),
        ({"posterior_alpha": math.nan}, "typical", "expected a number, found nan"),
        ({"rejection_sample_method": "standard"}, "typical", "with acceptance 'rejection'"),
        ({"acceptance": "synthetic"}, "typical", "with acceptance 'synthetic'"),
    ],
)
def test_unsupported_combinations_are_refused(keys, acceptance, message):
    text = json.dumps({"method": "ngram", **keys})
    with pytest.raises(InputError, match=message):
        EngineConfig(model="x", speculative_config=text, spec_acceptance=acceptance)
