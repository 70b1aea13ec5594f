"""The sampler: filters against a slow reference, and the statistics and repeatability of draws."""

import numpy as np
import pytest
import torch

from qserve.engine.sampler import (
    INVALID_TOKEN,
    SamplingRows,
    filter_logits,
    gumbel_noise,
    sample,
)


def rows(size, **values):
    fields = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "position": 0,
    }
    dtypes = {"top_k": np.int64, "seed": np.int64, "position": np.int64}
    arrays = {
        name: np.broadcast_to(
            np.asarray(values.get(name, default), dtypes.get(name, np.float32)), (size,)
        ).copy()
        for name, default in fields.items()
    }
    banned = values.get("banned", [])
    return SamplingRows(
        **arrays,
        banned_row=np.array([row for row, _ in banned], np.int64),
        banned_token=np.array([token for _, token in banned], np.int64),
    )


def slow_kept(logits, min_p, top_k, top_p):
    """The token ids that survive, by sorting one row in plain Python."""
    probabilities = torch.tensor(logits, dtype=torch.float64).softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = [i for i in order if probabilities[i] >= min_p * probabilities[order[0]]]
    if top_k > 0:
        order = order[:top_k]
    total = sum(probabilities[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p and top_p < 1:
            break
        kept.append(i)
        mass += probabilities[i] / total
    return set(kept)


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0, 0, 1), (0.1, 0, 1), (0, 3, 1), (0, 0, 0.5), (0.02, 7, 0.8), (1, 0, 1), (0, 1, 0.1)],
)
def test_filters_keep_what_a_slow_sort_keeps(min_p, top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(8, 33) * 2
    filtered = filter_logits(
        logits,
        torch.full((8,), float(min_p)),
        torch.full((8,), top_k),
        torch.full((8,), float(top_p)),
    )
    for row, got in zip(logits.tolist(), filtered, strict=True):
        kept = set(got.isfinite().nonzero().flatten().tolist())
        assert kept == slow_kept(row, min_p, top_k, top_p)
        assert all(got[i] == row[i] for i in kept)


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    tokens = sample(logits, rows(20_000, seed=np.arange(20_000), temperature=0.7))
    expected = (logits[0] / 0.7).softmax(-1)
    share = torch.bincount(tokens, minlength=4) / 20_000
    # four standard deviations of a share
    assert ((share - expected).abs() < 4 * (expected * (1 - expected) / 20_000).sqrt()).all()


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_do_not_repeat_when_only_one_key_changes(vary):
    logits = torch.zeros(512, 64)
    tokens = sample(logits, rows(512, **{vary: np.arange(512)}))
    assert len(tokens.unique()) > 55
    # neighbours are independent: as many equal pairs as chance gives
    assert 0 <= (tokens[1:] == tokens[:-1]).sum() < 25


def test_a_row_draws_the_same_in_any_batch():
    torch.manual_seed(1)
    logits = torch.randn(5, 100)
    alone = sample(logits[3:4], rows(1, seed=42, position=17))
    settings = {"seed": [1, 2, 3, 42, 5], "position": [9, 9, 9, 17, 9]}
    together = sample(logits, rows(5, **settings, top_p=[0.3, 1, 1, 1, 0.9]))
    assert together[3] == alone[0]


def test_noise_is_finite_for_extreme_seeds():
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    noise = gumbel_noise(seeds, torch.tensor([0, 1, 2**31, 5]), 5000)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.03  # Gumbel's mean is Euler's constant
    assert abs(noise.var() - np.pi**2 / 6) < 0.1


def test_greedy_rows_beside_random_ones_stay_greedy():
    torch.manual_seed(2)
    logits = torch.randn(64, 50)
    temperature = np.array([0.0, 1.5] * 32)
    tokens = sample(logits, rows(64, temperature=temperature, seed=np.arange(64)))
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert not torch.equal(tokens[1::2], logits[1::2].argmax(-1))


def test_nan_row_is_marked_and_others_are_not():
    logits = torch.zeros(3, 8)
    logits[:, 5] = 1
    logits[1, 2] = torch.nan
    for temperature in (0.0, 0.01):
        tokens = sample(logits, rows(3, temperature=temperature))
        assert tokens.tolist() == [5, INVALID_TOKEN, 5]


def test_banned_tokens_are_never_drawn():
    logits = torch.zeros(2, 4)
    logits[:, 2] = 50
    tokens = sample(logits, rows(2, temperature=0, banned=[(1, 2)]))
    assert tokens[0] == 2 and tokens[1] != 2
