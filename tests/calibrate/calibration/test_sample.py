"""Sample of tokens that statistics of inputs keep."""

import torch

from calibrate.calibration.statistics import MAX_SAMPLED, InputStatistics

WINDOW = 256


def test_sample_covers_all_batches_evenly():
    num_batches, tokens = 37, 4 * WINDOW
    stats = InputStatistics(2, "cpu")
    for batch in range(num_batches):
        place_T = torch.arange(tokens).float()
        stats.update(torch.stack([place_T, torch.full((tokens,), float(batch))], 1))
    place_T, batch_T = stats.sample().unbind(1)
    assert MAX_SAMPLED / 3 <= len(place_T) <= MAX_SAMPLED
    counts = torch.bincount(batch_T.long(), minlength=num_batches)
    assert counts.min() >= 1 and counts.max() - counts.min() <= 1
    # first tokens of windows have about their share, and the places of a window are all seen
    assert (place_T % WINDOW == 0).sum() <= 3 * len(place_T) / WINDOW + 1
    assert torch.histc(place_T % WINDOW, 8, 0, WINDOW).min() > len(place_T) / 16


def test_sample_of_many_small_batches_is_bounded():
    stats = InputStatistics(1, "cpu")
    for token in range(5 * MAX_SAMPLED):
        stats.update(torch.full((1, 1), float(token)))
    found_T = stats.sample()[:, 0]
    assert MAX_SAMPLED / 3 <= len(found_T) <= MAX_SAMPLED
    # all parts of the data have about their share
    assert torch.histc(found_T, 5, 0, 5 * MAX_SAMPLED).min() > len(found_T) / 10
