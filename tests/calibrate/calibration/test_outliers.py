"""Statistics of inputs in which a few tokens are far larger than the others."""

import torch

from calibrate.calibration.statistics import MOST_SAMPLED, InputStatistics, limit_outliers
from calibrate.solvers import gptq, rtn
from formats.scheme import QuantSpec

WINDOW, WIDTH = 256, 64


def correlated(num_tokens: int, seed: int) -> torch.Tensor:
    """Return tokens whose channels are correlated, as those of a language model are."""
    mixing = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_tokens, WIDTH, generator=generator)
    return torch.randn(num_tokens, 12, generator=generator) @ mixing + 0.1 * noise


def with_sinks(x_TK: torch.Tensor) -> torch.Tensor:
    """Return the tokens with a huge first token in each window."""
    sinks = torch.zeros(WIDTH)
    sinks[[5, 20]] = torch.tensor([3000.0, -1000.0])
    x_TK = x_TK.clone()
    x_TK[::WINDOW] = sinks
    return x_TK


def of(x_TK: torch.Tensor) -> InputStatistics:
    stats = InputStatistics(WIDTH, "cpu")
    for batch_TK in x_TK.split(4 * WINDOW):
        stats.update(batch_TK)
    return stats


def test_gptq_serves_the_other_tokens_of_windows_with_a_huge_first_token():
    x_TK, unseen_TK = correlated(16 * WINDOW, 0), correlated(2048, 1)
    weight_NK = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2))
    spec = QuantSpec(bits=3, symmetric=True, group_size=32)

    def error(found) -> float:
        return float((unseen_TK @ (weight_NK - found.dequantize()).t()).square().sum())

    clean = error(gptq.solve(weight_NK, of(x_TK), spec, "w"))
    disturbed = error(gptq.solve(weight_NK, of(with_sinks(x_TK)), spec, "w"))
    assert clean < 0.5 * error(rtn.solve(weight_NK, None, spec, "w"))
    assert disturbed < 1.5 * clean


def test_tokens_of_usual_magnitude_are_summed_exactly():
    x_TK = correlated(4 * WINDOW, 3)
    assert torch.equal(limit_outliers(x_TK), torch.ones(len(x_TK)))
    expected_KK = x_TK.double().t() @ x_TK.double()
    torch.testing.assert_close(of(x_TK).moment_KK.double(), expected_KK, rtol=1e-5, atol=1e-2)


def test_outlier_counts_like_a_hundred_tokens_and_keeps_its_range():
    x_TK = with_sinks(correlated(4 * WINDOW, 4))
    stats, size_T = of(x_TK), x_TK.double().square().sum(1)
    is_sink_T = size_T > 1e5
    assert is_sink_T.sum() == 4
    others = float(size_T[~is_sink_T].sum())
    found = float(stats.moment_KK.double().trace())
    # trace of x x^T is the squared magnitude
    assert abs(found - others - 4 * 100 * float(size_T.median())) < 1e-3 * found
    assert float(stats.absmax_K.max()) == 3000


def test_inputs_that_are_mostly_zero_are_not_outliers():
    x_TK = torch.zeros(64, WIDTH)
    x_TK[:8] = correlated(8, 5)
    assert torch.equal(limit_outliers(x_TK), torch.ones(64))


def test_sample_covers_all_batches_evenly():
    num_batches, tokens = 37, 4 * WINDOW
    stats = InputStatistics(2, "cpu")
    for batch in range(num_batches):
        place_T = torch.arange(tokens).float()
        stats.update(torch.stack([place_T, torch.full((tokens,), float(batch))], 1))
    place_T, batch_T = stats.sample().unbind(1)
    assert MOST_SAMPLED / 3 <= len(place_T) <= MOST_SAMPLED
    counts = torch.bincount(batch_T.long(), minlength=num_batches)
    assert counts.min() >= 1 and counts.max() - counts.min() <= 1
    # first tokens of windows have about their share, and the places of a window are all seen
    assert (place_T % WINDOW == 0).sum() <= 3 * len(place_T) / WINDOW + 1
    assert torch.histc(place_T % WINDOW, 8, 0, WINDOW).min() > len(place_T) / 16


def test_sample_of_many_small_batches_is_bounded():
    stats = InputStatistics(1, "cpu")
    for token in range(5 * MOST_SAMPLED):
        stats.update(torch.full((1, 1), float(token)))
    found_T = stats.sample()[:, 0]
    assert MOST_SAMPLED / 3 <= len(found_T) <= MOST_SAMPLED
    # all parts of the data have about their share
    assert torch.histc(found_T, 5, 0, 5 * MOST_SAMPLED).min() > len(found_T) / 10
