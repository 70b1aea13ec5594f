"""How many drafts a step gets: as many as bring the most tokens a second."""

import pytest

from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.depth import TRIAL_STEPS, TRIALS_EVERY, Depth
from tests.qserve.speculation.timed_requests import times_without

MS = 1e-3


def make(**settings):
    return Depth(SpeculativeConfig(method="ngram", num_speculative_tokens=5, **settings))


def simulate(depth, num_requests, seconds, passes, steps=2000):
    """The numbers of drafts of `steps` steps that take seconds(drafts)."""
    found = []
    for step in range(steps):
        count = depth.choose(num_requests).num_drafts
        found.append(count)
        depth.observe_seconds(num_requests, count, seconds(count))
        for request in range(min(num_requests, 4)):
            accepted = 0
            while accepted < count and (step * 7 + request * 13 + accepted * 29) % 100 < passes:
                accepted += 1
            if count:
                depth.observe(count, accepted)
    return found


def share(counts, chosen):
    return counts[500:].count(chosen) / len(counts[500:])


def test_cheap_accepted_drafts_increase_depth():
    counts = simulate(make(), 1, lambda k: (1.81 + 0.1 * k) * MS, passes=90)
    assert share(counts, 5) > 0.9


@pytest.mark.parametrize("num_requests", [16, 64])
def test_expensive_rows_disable_drafts(num_requests):
    counts = simulate(make(), num_requests, lambda k: (3 + 3 * k) * MS, passes=60)
    assert share(counts, 0) > 0.95
    # what trials cost: the share of time beyond that without drafts, less what they bring
    spent = sum(3 + 3 * k for k in counts[500:])
    assert spent < 1.03 * 3 * len(counts[500:])


def test_rejected_drafts_disable_speculation():
    counts = simulate(make(), 1, lambda k: (1.81 + 0.1 * k) * MS, passes=0)
    assert share(counts, 0) > 0.95


def test_depth_adapts_to_changed_acceptance():
    depth = make()
    simulate(depth, 1, lambda k: (2 + 3 * k) * MS, passes=50)
    counts = simulate(depth, 1, lambda k: (2 + 0.1 * k) * MS, passes=90, steps=30 * TRIALS_EVERY)
    assert counts[-TRIALS_EVERY // 2 :].count(5) > TRIALS_EVERY // 2 - 2 * TRIAL_STEPS


def test_delayed_steps_are_not_measured():
    """The first two with 3 drafts capture graphs; one without drafts follows one that was late."""
    num_seen = {}

    def seconds(k):
        num_seen[k] = num_seen.get(k, 0) + 1
        held_up = {(3, 1): 3.9, (3, 2): 3.9, (0, 3): 1.9, (0, 4): 0.1}.get((k, num_seen[k]), 1.0)
        return held_up * (2.9 + 0.6 * k) * MS

    depth = make()
    counts = simulate(depth, 16, seconds, passes=85, steps=TRIALS_EVERY)
    best = max((0, 1, 3, 5), key=lambda k: depth.expected_tokens(k) / (2.9 + 0.6 * k))
    assert best == 3 and counts[-200:].count(best) == 200


def test_verify_rows_of_a_step_are_bounded():
    depth = make(adaptive=False)
    assert [depth.choose(n).num_drafts for n in (1, 42, 43, 129)] == [5, 5, 0, 0]
    assert [make().choose(n).num_drafts for n in (42, 43, 64, 65, 128, 129)] == [5, 3, 3, 1, 1, 0]


def test_depth_table_is_used():
    depth = make(num_speculative_tokens_per_batch_size=((1, 4, 5), (5, 16, 2), (17, 99, 0)))
    found = [depth.choose(n) for n in (1, 4, 5, 16, 17, 500)]
    assert [choice.num_drafts for choice in found] == [5, 5, 2, 2, 0, 0]
    assert [choice.runs_drafter for choice in found] == [True] * 4 + [False] * 2


def milliseconds(size, rows, drafts, of_row=0.0235):
    """Step durations of an 8B in W4A16 with an EAGLE-3 head on an H200: 1.85 ms for a row, 3.4 for
    64."""
    found = 1.83 + of_row * size * rows
    return found + drafts * (0.08 + 0.003 * size) + (0.1 + 0.0025 * size * rows if drafts else 0)


@pytest.mark.parametrize(
    ("num_requests", "least"), [(1, 1.9), (8, 1.6), (32, 1.1), (64, 0.98), (96, 0.98), (256, 0.98)]
)
def test_depth_is_mostly_zero_if_gain_is_small(num_requests, least):
    """Requests that came together end one by one, the last in steps that hold few."""
    for seed in range(6):
        depth = Depth(SpeculativeConfig(method="ngram", num_speculative_tokens=3))
        found = times_without(depth, milliseconds, num_requests, seed=seed)
        assert found > least, (num_requests, seed, found)
