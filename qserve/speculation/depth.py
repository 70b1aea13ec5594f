"""Depth: chooses the number of drafts per request for each step.

It chooses the number with the most expected tokens per second: expected tokens of a verify, divided
by the duration of a step. Both are measured while the engine runs: the conditional acceptance rate
per position, and the duration of steps by number of requests and drafts. From time to time, a few
steps try another number of drafts, to measure it again.
"""

import statistics
from typing import NamedTuple

from qserve.speculation.config import SpeculativeConfig

NEWEST_DRAFTS = 1 / 256  # minimum weight of the newest verify in an acceptance rate
NEWEST_STEP = 0.1  # weight of the newest step in a duration
FIRST_SHARE = 0.7  # assumed acceptance rate before any verify
TRIAL_STEPS = 4  # number of steps of a trial
TRIALS_EVERY = 400  # steps between trials; trials cost about 1% if drafts do not pay off
MAX_SURPRISE = 4.0  # a step that took this many times longer is ignored: it was delayed otherwise
KEPT_FOR = 1.02  # switch only to a number of drafts that is better by this factor
# Drafts must be better than no drafts by this factor. With drafts, requests that arrived together
# finish at different times, so the last steps have few requests.
WORTH = 1.05


class Choice(NamedTuple):
    """Number of drafts for one step."""

    num_drafts: int
    runs_drafter: bool = True


class _Size:
    """Measurements of steps with similar numbers of requests."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # number of drafts -> duration of a step
        self.num_measured: dict[int, int] = {}  # number of drafts -> number of measured steps
        self.chosen: int | None = None  # current number of drafts
        self.trial: int | None = None  # number of drafts of the current trial
        self.num_left = 0  # remaining steps of the trial
        self.of_trial: list[float] = []  # durations of the trial's steps so far
        self.num_steps = 0  # steps since the last trial
        self.goes_up = False  # True: the last trial used more drafts


class Depth:
    """Chooses the number of drafts for the steps of one engine."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._adaptive = config.adaptive and not config.num_speculative_tokens_per_batch_size
        self._table = config.num_speculative_tokens_per_batch_size
        self._levels = (0, *config.depths)
        self._max_rows = config.max_rows
        self._shares = [FIRST_SHARE] * config.most_tokens
        self._num_seen = [0] * config.most_tokens
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_requests: int) -> Choice:
        """Choose the number of drafts for a step of `num_requests`."""
        count = self._most(num_requests)
        if self._adaptive and count and num_requests:
            count = self._best(num_requests, count)
        return Choice(count, runs_drafter=count > 0)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Record a verify. Only the drafts up to the first rejected one count."""
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
            # The median, not the mean: the first steps may capture graphs, and after a late read
            # the next step looks short.
            size.of_trial.append(seconds)
            size.seconds[num_drafts] = statistics.median_low(size.of_trial)
        elif known is None:
            size.seconds[num_drafts] = seconds
        elif seconds < MAX_SURPRISE * known:
            size.seconds[num_drafts] += NEWEST_STEP * (seconds - known)

    def expected_tokens(self, num_drafts: int) -> float:
        """Return the expected number of tokens of a verify: accepted drafts and the bonus token."""
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
        """Return the measurements for a number of requests. 33 to 64 requests share them."""
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
            # Try one level up or down, in turns. More distant levels would cost more.
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
        """Return tokens per second of a request, reduced by WORTH if there are drafts."""
        rate = self.expected_tokens(num_drafts) / seconds
        return rate / WORTH if num_drafts else rate

    def _try(self, size: _Size, count: int) -> None:
        size.trial, size.num_left, size.num_steps = count, TRIAL_STEPS, 0
        size.of_trial = []
