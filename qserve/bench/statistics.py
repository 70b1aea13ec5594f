"""Percentiles, means and spread of measured values; all are 0 for no values. Loads no torch."""

from collections.abc import Iterable, Sequence

import numpy as np


def percentiles(values: Sequence[float], wanted: Iterable[float]) -> dict[str, float]:
    """Return a table: percentile as text, such as "99.9" -> value, linearly interpolated."""
    data = np.asarray(values, float)
    return {f"{p:g}": float(np.percentile(data, p)) if data.size else 0.0 for p in wanted}


def spread_percent(values: Sequence[float]) -> float:
    """Return the maximum minus the minimum, in percent of the median."""
    data = np.asarray(values, float)
    median = float(np.median(data)) if data.size else 0.0
    return 100 * float(data.max() - data.min()) / median if median else 0.0


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of the population, as numpy and vLLM do."""
    return float(np.std(values)) if len(values) else 0.0
