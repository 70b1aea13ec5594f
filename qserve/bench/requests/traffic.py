"""Send times of requests, with gamma-distributed intervals and a constant or rising rate.

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
    """Return the time of each of `count` requests, in seconds from the start.

    The intervals have the distribution Gamma(burstiness, 1 / (rate * burstiness)). With a
    burstiness of 1 this is a Poisson process, with infinity the intervals are equal. `ramp_up` is
    (strategy, start rate, end rate). Without it the times are scaled so that the last request is
    sent at count / rate, as in vLLM.
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
