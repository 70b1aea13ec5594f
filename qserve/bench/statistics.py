"""Percentiles, spread, and the summary of a series. Loads no torch."""

from collections.abc import Iterable, Sequence

import numpy as np


def percentiles(values: Sequence[float], wanted: Iterable[float]) -> dict[str, float]:
    """Percentile as text, such as 99.9 -> value, by linear interpolation; 0 for no values."""
    data = np.asarray(values, float)
    return {f"{p:g}": float(np.percentile(data, p)) if data.size else 0.0 for p in wanted}


def spread_percent(values: Sequence[float]) -> float:
    """Maximum minus minimum, in percent of the median."""
    data = np.asarray(values, float)
    median = float(np.median(data)) if data.size else 0.0
    return 100 * float(data.max() - data.min()) / median if median else 0.0


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def deviation(values: Sequence[float]) -> float:
    """Standard deviation, as in numpy and vLLM."""
    return float(np.std(values)) if len(values) else 0.0
