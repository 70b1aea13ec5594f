"""StepPace: how many prompt tokens a step may hold so that it ends in time. Knows no requests.

A step's seconds are taken as linear in what it computes. The factors are fitted while the engine
runs, by recursive least squares that forgets: they follow the lengths and the load of the moment.
Pure arithmetic on what it is told, so the same measurements give the same chunks.
"""

import math
from dataclasses import dataclass

import numpy as np

# A step that decodes holds at least so many tokens of prompts, whatever the target: a prompt comes
# to its end, if slowly.
MIN_PROMPT_TOKENS = 64
FORGET = 0.98  # the weight of a step among those after it: 50 steps count
ERRORS_KEPT = 2.0  # mean relative errors of the prediction that are kept free below the target
# A step that took more than so many times the prediction was held up by something else, such as
# the compilation of a kernel; it counts as one that took so long.
MAX_SURPRISE = 4.0
# The variance of a factor that nothing is known of, in those of one step's measurement.
UNKNOWN = 1000.0
MIN_STEPS = 8  # before this the prediction is not trusted, and no step is called a surprise


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What decides how long a step takes."""

    num_prompt_tokens: int = 0
    num_decodes: int = 0
    num_keys: int = 0  # that the decodes read
    num_pairs: int = 0  # of prompt tokens and the keys that they read

    def features(self) -> np.ndarray:
        """Of about equal size, so that one prior suits all."""
        return np.array(
            [
                1.0,
                self.num_prompt_tokens / 1e3,
                self.num_decodes / 1e2,
                self.num_keys / 1e5,
                self.num_pairs / 1e7,
            ]
        )


class StepPace:
    """The seconds of steps, as far as they are known, and the target for those that decode."""

    def __init__(self, target: float) -> None:
        """`target`: seconds that a running request may wait for its next token."""
        self.target = target
        self._factors = np.zeros(5)
        self._covariance = np.eye(5) * UNKNOWN
        self._mean_error = 0.0
        self._num_steps = 0

    def predict(self, load: StepLoad) -> float:
        """Seconds that a step takes."""
        return max(0.0, float(self._factors @ load.features()))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that was measured."""
        features, predicted = load.features(), self.predict(load)
        if self._num_steps >= MIN_STEPS and predicted > 0:
            seconds = min(seconds, MAX_SURPRISE * predicted)
        gain = self._covariance @ features
        gain /= FORGET + features @ gain
        self._factors += gain * (seconds - self._factors @ features)
        covariance = (self._covariance - np.outer(gain, features @ self._covariance)) / FORGET
        # What no step has shown for long would be forgotten without bound.
        self._covariance = covariance * min(1.0, UNKNOWN / covariance.diagonal().max())
        self._num_steps += 1
        if self._num_steps > MIN_STEPS and predicted > 0:
            error = abs(seconds / predicted - 1)
            self._mean_error += (error - self._mean_error) * (1 - FORGET)

    def max_prompt_tokens(self, load: StepLoad, start: int, limit: int) -> int:
        """Tokens of a prompt, from its position `start` on, beside decodes that are planned."""
        if not load.num_decodes:
            return limit  # nobody waits for a token
        if self._num_steps < MIN_STEPS:
            return min(limit, MIN_PROMPT_TOKENS)
        spare = self.target / (1 + ERRORS_KEPT * self._mean_error) - self.predict(load)
        # each token more costs its own work and that of the keys before it
        linear = max(self._factors[1], 1e-9) / 1e3 + max(self._factors[4], 0.0) * start / 1e7
        square = max(self._factors[4], 0.0) / 2 / 1e7
        if spare <= 0:
            count = 0.0
        elif square * spare < 1e-9 * linear**2:
            count = spare / linear
        else:
            count = (math.sqrt(linear**2 + 4 * square * spare) - linear) / (2 * square)
        return min(limit, max(MIN_PROMPT_TOKENS, int(min(count, limit))))
