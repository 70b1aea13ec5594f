"""Send times of requests: gamma-distributed intervals, at a constant rate or a ramp.

Loads no torch.
"""

import math

import numpy as np


def arrival_times(
    count: int,
    *,
    rate: float,
    burstiness: float = 1.0,
    ramp_up: tuple[str, float, float] | None = None,
    seed: int = 0,
) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent.

    The intervals are Gamma(burstiness, 1 / (rate * burstiness)): 1 is a Poisson process, infinity
    is even spacing. Without `ramp_up` (strategy, start, end) the times are scaled so that the last
    request is sent at count / rate, as in vLLM.
    """
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    random = np.random.default_rng(seed)
    rates = np.array([_rate(i, count, rate, ramp_up) for i in range(count)])
    # A ramp may start at rate zero, which would never send the first request.
    rates = np.maximum(rates, 1e-3)
    if math.isinf(burstiness):
        delays = 1 / rates
    else:
        delays = random.gamma(burstiness, 1 / (rates * burstiness))
    times = np.cumsum(delays)
    if ramp_up is None and count and times[-1] > 0:
        times *= count / rate / times[-1]
    return times.tolist()


def _rate(index: int, count: int, rate: float, ramp_up: tuple[str, float, float] | None) -> float:
    if ramp_up is None:
        return rate
    strategy, start, end = ramp_up
    progress = index / max(count - 1, 1)
    if strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
