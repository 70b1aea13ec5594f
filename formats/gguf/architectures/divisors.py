"""Frequency divisors of rotary embeddings, and the rules that give them. Needs no torch."""

import math
from typing import Any

ORIGINAL = "original_max_position_embeddings"
# parameters of Llama 3's rule: low and high factor, and the context lengths to try
LLAMA3_FACTORS = ((1.0, 4.0), (1.0, 32.0))
LLAMA3_LENGTHS = (8192, 4096, 16384, 32768, 2048, *(2**n for n in (17, 16, 18, 10, 9, 8, 7, 6)))


def scaling_of(
    divisors: list[float], theta: float, width: int, length: int
) -> dict[str, Any] | None:
    """Return the RoPE scaling with these frequency divisors; None: all are 1.

    Divisors that Llama 3's rule does not give are listed, as for LongRoPE of any `length`.
    """
    if all(each == 1.0 for each in divisors):
        return None
    return llama3_parameters(divisors, theta, width) or {
        "rope_type": "longrope",
        "long_factor": divisors,
        "short_factor": divisors,
        ORIGINAL: length,
        "attention_factor": 1.0,
    }


def llama3_divisors(
    theta: float, width: int, factor: float, low: float, high: float, original: float
) -> list[float]:
    """Return Llama 3's divisors of the inverse frequencies."""
    divisors = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * theta ** (i / width)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def llama3_parameters(found: list[float], theta: float, width: int) -> dict[str, Any] | None:
    """Return Llama 3's parameters that give these divisors; None: no parameters do."""
    factor = max(found)
    for low, high in LLAMA3_FACTORS:
        for original in LLAMA3_LENGTHS:
            made = llama3_divisors(theta, width, factor, low, high, original)
            if all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(made, found, strict=True)):
                return {
                    "rope_type": "llama3",
                    "factor": float(factor),
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    ORIGINAL: original,
                }
    return None
