"""Sampling in plain torch: filters against a slow reference, penalties by hand, and the statistics
and repeatability of draws."""

import math

import numpy as np
import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.sampling.reference import adjust, filter_logits, gumbel_noise
from qkernels.sampling.settings import INVALID_TOKEN, SampleSettings
from qkernels.sampling.words import SampleRow


def sample(logits, rows, history=None):
    return ops.sample_(logits, SampleSettings.of(rows), history).tokens_S


def rows(size, **values):
    """Fields are numbers, or one number for each row."""
    columns = {name: np.broadcast_to(np.asarray(v), (size,)).tolist() for name, v in values.items()}
    columns = {"temperature": [1.0] * size} | columns
    return [SampleRow(**{name: v[i] for name, v in columns.items()}) for i in range(size)]


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
def test_filters_equal_sorted_reference(min_p, top_k, top_p):
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


def test_row_draw_is_independent_of_batch():
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


def test_greedy_rows_stay_greedy_in_mixed_batch():
    torch.manual_seed(2)
    logits = torch.randn(64, 50)
    temperature = np.array([0.0, 1.5] * 32)
    tokens = sample(logits, rows(64, temperature=temperature, seed=np.arange(64)))
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert not torch.equal(tokens[1::2], logits[1::2].argmax(-1))


def test_only_nan_rows_are_flagged():
    logits = torch.zeros(3, 8)
    logits[:, 5] = 1
    logits[1, 2] = torch.nan
    for temperature in (0.0, 0.01):
        tokens = sample(logits, rows(3, temperature=temperature))
        assert tokens.tolist() == [5, INVALID_TOKEN, 5]


def test_forbidden_tokens_are_never_drawn():
    logits = torch.zeros(2, 4)
    logits[:, 2] = 50
    forbids = SampleRow(bias=((2, -math.inf),))
    tokens = sample(logits, [SampleRow(), forbids])
    assert tokens[0] == 2 and tokens[1] != 2
    assert sample(torch.tensor([[-1.0, -2.0, math.inf]]), [forbids]).tolist() == [0]


def test_bias_and_penalties_equal_handmade():
    """Token 0 is in the prompt, 1 once in the output, 2 in both, 3 times, 3 nowhere."""
    history = torch.tensor([[9, 9, 9, 9], [1, 2, 7, 0]], dtype=torch.int32)
    logits = torch.tensor([[2.0, -1.0, 4.0, 1.0]]).expand(4, 4)
    settings = SampleSettings.of(
        [
            SampleRow(history_row=1, presence_penalty=0.5),
            SampleRow(history_row=1, frequency_penalty=0.5),
            SampleRow(history_row=1, repetition_penalty=2.0),
            SampleRow(history_row=-1, presence_penalty=0.5, bias=((0, 1.5), (3, -2.0))),
        ]
    )
    assert adjust(logits, settings, history).tolist() == [
        [2.0, -1.5, 3.5, 1.0],
        [2.0, -1.5, 2.5, 1.0],
        [1.0, -2.0, 2.0, 1.0],
        [3.5, -1.0, 4.0, -1.0],
    ]


def test_drawn_tokens_are_counted_in_place():
    history = torch.zeros(3, 4, dtype=torch.int32)
    logits = torch.tensor([[0.0, 0, 5, 0], [0, 5, 0, 0], [0, 0, 0, math.nan]])
    settings = [SampleRow(history_row=row, presence_penalty=1) for row in (2, -1, 0)]
    assert sample(logits, settings, history).tolist() == [2, 1, INVALID_TOKEN]
    assert history.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 0]]


def test_logprobs_ignore_bias_temperature_and_filters():
    """Neither bias nor temperature nor filter changes them."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).repeat(3, 1)
    settings = SampleSettings.of(
        [
            SampleRow(num_logprobs=2, bias=((0, 50.0),), temperature=0.5, top_k=1),
            SampleRow(),
            SampleRow(num_logprobs=0),
        ]
    )
    got = ops.sample_(logits, settings)
    want = logits[0].log_softmax(-1)
    assert got.tokens_S.tolist() == [0, 1, 1]
    assert got.logprobs_S[[0, 2]].tolist() == want[[0, 1]].tolist()
    assert got.top_tokens_SN.tolist() == [[1, 2], [-1, -1], [-1, -1]]
    assert got.top_logprobs_SN[0].tolist() == want[[1, 2]].tolist()
    assert got.top_logprobs_SN[1:].eq(-math.inf).all()


def test_batch_without_logprobs():
    got = ops.sample_(torch.zeros(1, 4), SampleSettings.of([SampleRow()]))
    assert got[1:] == (None, None, None)


def test_sample_settings_round_trip():
    row = SampleRow(temperature=0.3, top_p=0.95, seed=-(2**63), position=2**40, history_row=7)
    settings = SampleSettings.of([SampleRow(), row])
    assert settings.column("temperature").tolist() == [0.0, float(np.float32(0.3))]
    assert settings.column("seed").tolist() == [0, -(2**63)]
    assert settings.column("position").tolist() == [0, 2**40]
    assert settings.column("num_logprobs").tolist() == [-1, -1]


@pytest.mark.parametrize(
    "logits, row, history, problem",
    [
        (torch.zeros(2, 4), SampleRow(), None, "sample_ settings"),
        (torch.zeros(4), SampleRow(), None, "2 dims"),
        (torch.zeros(1, 4, dtype=torch.int64), SampleRow(), None, "float32"),
        (torch.zeros(1, 4), SampleRow(num_logprobs=21), None, "at most 20"),
        (torch.zeros(1, 4), SampleRow(), torch.zeros(2, 5, dtype=torch.int32), "history"),
        (torch.zeros(1, 4), SampleRow(), torch.zeros(2, 4), "history"),
        (torch.zeros(1, 4), SampleRow(), torch.zeros(4, 2, dtype=torch.int32).t(), "contiguous"),
    ],
)
def test_invalid_arguments_are_refused(logits, row, history, problem):
    with pytest.raises(KernelError, match=problem):
        ops.sample_(logits, SampleSettings.of([row]), history)


def test_biases_of_selected_rows():
    """`of_rows` picks rows: theirs are no longer the first biases, nor in order."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    biases = [((3, 2.0), (7, -4.0)), (), ((9, 1.5),), ((3, -3.0), (11, 30.0))]
    settings = SampleSettings.of([SampleRow(bias=bias) for bias in biases])
    whole = adjust(logits, settings, None)
    assert whole[3].argmax() == 11 and not torch.equal(whole, logits)
    for chosen in ([2], [1, 3], [3, 0]):
        some = settings.of_rows(settings.words_SP[chosen])
        assert torch.equal(adjust(logits[chosen], some, None), whole[chosen])
