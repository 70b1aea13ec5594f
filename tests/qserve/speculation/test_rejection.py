"""The rejection sampler: the output has the model's distribution, for any drafts."""

import json

import pytest
import torch

from qkernels.sampling.reference import gumbel_noise
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import SampleRow
from qserve.speculation import drafter as drafters
from qserve.speculation import rejection
from qserve.speculation.acceptance import Verify
from qserve.speculation.rejection import DRAFT_SALT, draw_verify
from tests.qserve.speculation.drafters import ERRING
from tests.qserve.speculation.traces import make_engine, make_requests, run

V, D = 8, 60_000
# Total variation of D draws of 8 tokens is about 0.4 sqrt(V / D) = 0.0046 if all is right.
NOISE = 0.009
P = torch.tensor([0.10, 0.60, 0.30, 0, 0, 0, 0, 0]), torch.full((V,), 1 / V)
Q = torch.tensor([0.55, 0.05, 0.10, 0.30, 0, 0, 0, 0]), torch.arange(1.0, V + 1) / 36


def words(seeds_D, position):
    row = SampleSettings.of([SampleRow(temperature=1.0, position=position)]).words_SP
    words_DP = row.repeat(len(seeds_D), 1)
    words_DP[:, rejection.SEED] = seeds_D
    return words_DP


def drawn(p, q, *, salt=DRAFT_SALT, is_point=False):
    """(tokens [D, 3], accepted [D]) of chunks of two drafts; p and q are the same in every row."""
    seeds_D = torch.arange(D) * 7919
    drafts = [
        (q.log() + gumbel_noise(seeds_D ^ salt, torch.full((D,), 5 + k), V)).argmax(-1)
        for k in range(2)
    ]
    if is_point:
        drafts = [torch.full((D,), 1), torch.full((D,), 6)]
    drafts_S = torch.stack([*drafts, torch.zeros(D, dtype=torch.int64)], 1).flatten()
    words_SP = torch.stack([words(seeds_D, 5 + k) for k in range(3)], 1).flatten(0, 1)
    settings = SampleSettings.of_words(words_SP.numpy(), torch.zeros(0).long().numpy())
    first_D = torch.arange(D) * 3
    verify = Verify(first_D=first_D, count_D=torch.full((D,), 3), drafts_S=drafts_S, most=3)
    q_DKV = None if is_point else q.expand(D, 2, V)
    samples, accepted_D = draw_verify(p.log().expand(3 * D, V), settings, None, verify, q_DKV)
    return samples.tokens_S.view(D, 3), accepted_D


def distance(tokens, p):
    counts = torch.bincount(tokens, minlength=V) / len(tokens)
    return float((counts - p).abs().sum() / 2)


@pytest.mark.parametrize("is_point", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_rejection_sampling_keeps_model_distribution(number, is_point):
    p, q = P[number], Q[number]
    tokens, accepted = drawn(p, q, is_point=is_point)
    for column in range(3):
        reached = accepted >= column
        if reached.sum() > D / 8:
            scale = (D / int(reached.sum())) ** 0.5
            assert distance(tokens[reached, column], p) < NOISE * scale
    # and what is emitted second does not follow from what was first
    both = accepted >= 1
    if both.sum() > D / 8:
        chosen = tokens[both & (tokens[:, 0] == tokens[both, 0].mode().values), 1]
        assert distance(chosen, p) < NOISE * (D / len(chosen)) ** 0.5
    if not is_point:
        expected = float(torch.minimum(p, q).sum())
        assert abs(float((accepted >= 1).float().mean()) - expected) < 0.01


def test_reusing_draft_noise_biases_distribution():
    tokens, _ = drawn(P[1], Q[1], salt=0)
    assert distance(tokens[:, 0], P[1]) > 2 * NOISE


def test_point_mass_draft_is_accepted_with_its_probability():
    _, accepted = drawn(P[0], Q[0], is_point=True)
    assert abs(float((accepted >= 1).float().mean()) - 0.6) < 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method", [pytest.param("ngram", marks=pytest.mark.exhaustive), "draft_model"]
)
def test_greedy_requests_keep_their_text(docs_5m, method, monkeypatch):
    """Also with penalties, log probabilities, grammars and a step in flight; others run along."""
    monkeypatch.setitem(drafters.DEVICE_DRAFTERS, "draft_model", ERRING)
    kinds = ("greedy", "penalties", "logprobs", "form, penalties", "hot", "frequency")
    requests = make_requests(8, 8, kinds)
    want = run(make_engine(docs_5m), requests)
    config = {"method": method, "num_speculative_tokens": 3}
    config |= {"model": str(docs_5m)} if method == "draft_model" else {"prompt_lookup_min": 2}
    settings = {"speculative_config": json.dumps(config), "spec_acceptance": "rejection"}
    engine = make_engine(docs_5m, 1, **settings)
    found = run(engine, requests)
    for name, _, params in requests:
        assert params.temperature or found[name] == want[name], name
    verifies, _, *accepted = engine.scheduler.speculation.take_counts()
    assert 0 < accepted[0] < verifies
