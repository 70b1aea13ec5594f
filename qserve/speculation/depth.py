"""Depth: how many drafts a step may hold for each of its requests. Knows counts, no requests.

The number is chosen that gives the most tokens a second: what is expected to come true, over the
time that such a step takes. Both are measured while the engine runs: the share of drafts that pass
at each position, given that those before it did, and the seconds of steps by their requests and
drafts. What was not measured lately is tried now and then, for a few steps.
"""

import statistics
from typing import NamedTuple

from qserve.speculation.config import SpeculativeConfig

NEWEST_DRAFTS = 1 / 256  # the least weight of the newest verify in a share
NEWEST_STEP = 0.1  # and of the newest step in its seconds
FIRST_SHARE = 0.7  # of drafts that pass, until there are any
TRIAL_STEPS = 4  # of a number of drafts whose seconds are not known
TRIALS_EVERY = 400  # steps between trials: they cost a percent where drafts do not pay
MAX_SURPRISE = 4.0  # a step that took so many times longer was held up by something else
KEPT_FOR = 1.02  # another number of drafts must be better by so much
# And any must be better than none by so much: with drafts requests that came together end one by
# one, the last in steps that hold few.
WORTH = 1.05


class Choice(NamedTuple):
    """Of one step."""

    num_drafts: int
    runs_drafter: bool = True


class _Size:
    """What is known of steps of about as many requests."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # by number of drafts
        self.num_measured: dict[int, int] = {}
        self.chosen: int | None = None
        self.trial: int | None = None
        self.num_left = 0  # steps of the trial
        self.of_trial: list[float] = []  # their seconds so far
        self.num_steps = 0  # since the last
        self.goes_up = False  # the last one was of more drafts


class Depth:
    """Of one engine."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._adaptive = config.adaptive and not config.num_speculative_tokens_per_batch_size
        self._table = config.num_speculative_tokens_per_batch_size
        self._levels = (0, *config.depths)
        self._max_rows = config.max_rows
        self._shares = [FIRST_SHARE] * config.most_tokens
        self._num_seen = [0] * config.most_tokens
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_requests: int) -> Choice:
        """For a step of so many requests."""
        count = self._most(num_requests)
        if self._adaptive and count and num_requests:
            count = self._best(num_requests, count)
        return Choice(count, runs_drafter=count > 0)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verify: all drafts up to the first that did not pass were judged."""
        for position in range(min(num_accepted + 1, num_drafts)):
            self._num_seen[position] += 1
            weight = max(1 / self._num_seen[position], NEWEST_DRAFTS)
            passed = position < num_accepted
            self._shares[position] += weight * (passed - self._shares[position])

    def observe_seconds(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """Learn how long a step took whose requests had so many drafts each."""
        size = self._size(num_requests)
        known = size.seconds.get(num_drafts)
        size.num_measured[num_drafts] = size.num_measured.get(num_drafts, 0) + 1
        if num_drafts == size.trial:
            # Not a mean: the first steps may have captured graphs, and one that was read late
            # makes the next one look short.
            size.of_trial.append(seconds)
            size.seconds[num_drafts] = statistics.median_low(size.of_trial)
        elif known is None:
            size.seconds[num_drafts] = seconds
        elif seconds < MAX_SURPRISE * known:
            size.seconds[num_drafts] += NEWEST_STEP * (seconds - known)

    def expected_tokens(self, num_drafts: int) -> float:
        """Of a verify: the drafts that pass, and the token behind them."""
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
        """Sizes are powers of two: what is learnt at 33 holds for 64."""
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
            self._try(size, missing[-1])  # the most drafts first
            return size.trial
        if size.num_steps >= TRIALS_EVERY:
            # one draft number up or down, in turns: the farther ones would cost more
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
        """Tokens a second of each request."""
        rate = self.expected_tokens(num_drafts) / seconds
        return rate / WORTH if num_drafts else rate

    def _try(self, size: _Size, count: int) -> None:
        size.trial, size.num_left, size.num_steps = count, TRIAL_STEPS, 0
        size.of_trial = []
