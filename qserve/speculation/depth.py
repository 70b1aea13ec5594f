"""Depth: how many drafts a step uses for each of its requests.

It chooses the number with the most expected tokens per second: the expected number of accepted
tokens over the duration of such a step. Both are measured while the engine runs: the acceptance
rate at each position, given that all before it were accepted, and the duration of steps by their
requests and drafts. A number that was not measured recently is tried for a few steps now and then.
"""

import statistics
from typing import NamedTuple

from qserve.speculation.config import SpeculativeConfig

NEWEST_DRAFTS = 1 / 256  # minimum weight of the newest verify in an acceptance rate
NEWEST_STEP = 0.1  # weight of the newest step in a duration
FIRST_SHARE = 0.7  # acceptance rate before any verify
TRIAL_STEPS = 4  # steps with a number of drafts of unknown duration
TRIALS_EVERY = 400  # steps between trials, which cost a percent if drafts do not pay off
MAX_SURPRISE = 4.0  # a step that took this many times longer was delayed by something else
KEPT_FOR = 1.02  # another number of drafts must be better by this factor
# Any drafts must be better than none by this factor: with drafts, requests that arrived together
# finish one by one, the last of them in small steps.
WORTH = 1.05


class Choice(NamedTuple):
    """Decision for one step."""

    num_drafts: int
    runs_drafter: bool = True


class _Size:
    """Measurements of steps with about as many requests."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # by number of drafts
        self.num_measured: dict[int, int] = {}
        self.chosen: int | None = None
        self.trial: int | None = None
        self.num_left = 0  # remaining steps of the trial
        self.of_trial: list[float] = []  # durations of its steps so far
        self.num_steps = 0  # since the last trial
        self.goes_up = False  # the last trial used more drafts


class Depth:
    """The adaptive depth of one engine."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._adaptive = config.adaptive and not config.num_speculative_tokens_per_batch_size
        self._table = config.num_speculative_tokens_per_batch_size
        self._levels = (0, *config.depths)
        self._max_rows = config.max_rows
        self._shares = [FIRST_SHARE] * config.most_tokens
        self._num_seen = [0] * config.most_tokens
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_requests: int) -> Choice:
        """Choose for a step of `num_requests`."""
        count = self._most(num_requests)
        if self._adaptive and count and num_requests:
            count = self._best(num_requests, count)
        return Choice(count, runs_drafter=count > 0)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Record a verify: all drafts up to the first rejected one were judged."""
        for position in range(min(num_accepted + 1, num_drafts)):
            self._num_seen[position] += 1
            weight = max(1 / self._num_seen[position], NEWEST_DRAFTS)
            passed = position < num_accepted
            self._shares[position] += weight * (passed - self._shares[position])

    def observe_seconds(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """Record the duration of a step whose requests had `num_drafts` drafts each."""
        size = self._size(num_requests)
        known = size.seconds.get(num_drafts)
        size.num_measured[num_drafts] = size.num_measured.get(num_drafts, 0) + 1
        if num_drafts == size.trial:
            # Not a mean: the first steps may have captured graphs, and a late read makes the next
            # step look short.
            size.of_trial.append(seconds)
            size.seconds[num_drafts] = statistics.median_low(size.of_trial)
        elif known is None:
            size.seconds[num_drafts] = seconds
        elif seconds < MAX_SURPRISE * known:
            size.seconds[num_drafts] += NEWEST_STEP * (seconds - known)

    def expected_tokens(self, num_drafts: int) -> float:
        """Expected tokens of a verify: the accepted drafts and the bonus token."""
        total = share = 1.0
        for position in range(num_drafts):
            share *= self._shares[position]
            total += share
        return total

    def _most(self, num_requests: int) -> int:
        if self._table:
            rows = [row for row in self._table if row[0] <= max(1, num_requests)]
            return rows[-1][2]
        return max(k for k in self._levels if not k or num_requests * (1 + k) <= self._max_rows)

    def _size(self, num_requests: int) -> _Size:
        """Measurements by power of two: those of 33 requests also hold for 64."""
        return self._sizes.setdefault((num_requests - 1).bit_length(), _Size())

    def _best(self, num_requests: int, most: int) -> int:
        size = self._size(num_requests)
        levels = [level for level in self._levels if level <= most]
        size.num_steps += 1
        if size.trial is not None and size.num_left > 0 and size.trial <= most:
            size.num_left -= 1
            return size.trial
        size.trial = None
        missing = [k for k in levels if size.num_measured.get(k, 0) < TRIAL_STEPS // 2]
        if missing and size.num_steps > 1:
            self._try(size, missing[-1])  # most drafts first
            return size.trial
        if size.num_steps >= TRIALS_EVERY:
            # one level up or down, in turns: more distant ones would cost more
            at = levels.index(size.chosen) if size.chosen in levels else len(levels) - 1
            size.goes_up = not size.goes_up
            near = at + 1 if (size.goes_up and at + 1 < len(levels)) or at == 0 else at - 1
            self._try(size, levels[near])
            return levels[near]
        rates = {k: self._rate(k, size.seconds[k]) for k in levels if k in size.seconds}
        if not rates:
            return most
        best = max(rates, key=rates.get)
        kept = rates.get(size.chosen)
        if kept is None or rates[best] > KEPT_FOR * kept:
            size.chosen = best
        return size.chosen

    def _rate(self, num_drafts: int, seconds: float) -> float:
        """Tokens per second of each request."""
        rate = self.expected_tokens(num_drafts) / seconds
        return rate / WORTH if num_drafts else rate

    def _try(self, size: _Size, count: int) -> None:
        size.trial, size.num_left, size.num_steps = count, TRIAL_STEPS, 0
        size.of_trial = []
