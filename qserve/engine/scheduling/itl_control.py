"""ItlControl: limits the prompt tokens of a step so that it meets an inter-token latency target.

The duration of a step is modelled as linear in the work that it computes. The factors are fitted
while the engine runs, by recursive least squares with forgetting, so they follow the current
lengths and load. The result depends only on the measurements: equal measurements give equal chunks.
"""

import math
from dataclasses import dataclass

import numpy as np

# Minimum number of prompt tokens in a step that decodes, even if the target is missed, so that
# every prompt finishes.
MIN_PROMPT_TOKENS = 64
FORGET = 0.98  # weight of a step relative to the step after it: about 50 steps count
# Margin below the target, as a multiple of the mean relative error of the prediction.
ERRORS_KEPT = 2.0
# If a step takes longer than this many times the prediction, something else delayed it, such as
# the compilation of a kernel. The excess is ignored.
MAX_SURPRISE = 4.0
# Variance of a factor before any measurement, in units of one measurement's variance.
UNKNOWN = 1000.0
MIN_STEPS = 8  # before so many steps, predictions are not used and outliers are not clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The work of a step, which determines its duration."""

    num_prompt_tokens: int = 0
    num_decodes: int = 0
    num_keys: int = 0  # number of keys that the decodes read
    num_pairs: int = 0  # number of (prompt token, key) pairs in attention

    def features(self) -> np.ndarray:
        """Return the model's inputs, scaled to similar magnitude so that one prior suits all."""
        return np.array(
            [
                1.0,
                self.num_prompt_tokens / 1e3,
                self.num_decodes / 1e2,
                self.num_keys / 1e5,
                self.num_pairs / 1e7,
            ]
        )


class ItlControl:
    """Model of step durations, and the inter-token latency target of the decodes."""

    def __init__(self, target: float) -> None:
        """`target`: maximum seconds between two tokens of a running request."""
        self.target = target
        self._factors = np.zeros(5)
        self._covariance = np.eye(5) * UNKNOWN
        self._mean_error = 0.0
        self._num_steps = 0

    def predict(self, load: StepLoad) -> float:
        """Return the predicted duration of a step in seconds."""
        return max(0.0, float(self._factors @ load.features()))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Update the model with a measured step."""
        features, predicted = load.features(), self.predict(load)
        if self._num_steps >= MIN_STEPS and predicted > 0:
            seconds = min(seconds, MAX_SURPRISE * predicted)
        gain = self._covariance @ features
        gain /= FORGET + features @ gain
        self._factors += gain * (seconds - self._factors @ features)
        covariance = (self._covariance - np.outer(gain, features @ self._covariance)) / FORGET
        # Without the limit, the variance of a feature that is 0 in all recent steps would grow
        # without bound.
        self._covariance = covariance * min(1.0, UNKNOWN / covariance.diagonal().max())
        self._num_steps += 1
        if self._num_steps > MIN_STEPS and predicted > 0:
            error = abs(seconds / predicted - 1)
            self._mean_error += (error - self._mean_error) * (1 - FORGET)

    def max_prompt_tokens(self, load: StepLoad, start: int, limit: int) -> int:
        """Return how many prompt tokens, from position `start` on, can join a step with `load`.

        `limit`: the maximum.
        """
        if not load.num_decodes:
            return limit  # no decode is delayed
        if self._num_steps < MIN_STEPS:
            return min(limit, MIN_PROMPT_TOKENS)
        spare = self.target / (1 + ERRORS_KEPT * self._mean_error) - self.predict(load)
        # each further token costs its own work and reads the keys before it
        linear = max(self._factors[1], 1e-9) / 1e3 + max(self._factors[4], 0.0) * start / 1e7
        square = max(self._factors[4], 0.0) / 2 / 1e7
        if spare <= 0:
            count = 0.0
        elif square * spare < 1e-9 * linear**2:
            count = spare / linear
        else:
            count = (math.sqrt(linear**2 + 4 * square * spare) - linear) / (2 * square)
        return min(limit, max(MIN_PROMPT_TOKENS, int(min(count, limit))))
