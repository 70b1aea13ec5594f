"""Choose the scale of a static activation: one scale for all inputs of a linear.

A scale for the largest value of the data is safe but poor: a few tokens have outliers, and all
other values would be rounded coarsely. Instead the scale minimizes the squared error of the
linears' outputs on a sample of the data; larger values are clipped.

Legend: T tokens, K inputs, N outputs.
"""

from collections.abc import Sequence

import torch

from calibrate.calibration.activations import NVFP4_LARGEST
from calibrate.calibration.statistics import InputStatistics
from formats.numerics.activation import LARGEST, MIN_INPUT_SCALE
from formats.scheme import ActivationSpec

# Fractions of the largest value to try, down to about a fiftieth.
FRACTIONS = tuple(0.88**i for i in range(31))


def static_scale(
    stats: InputStatistics, activation: ActivationSpec, weights: Sequence[torch.Tensor] = ()
) -> float:
    """Return the scale of one input.

    `weights` [N, K]: the weights of all linears that read the input. Rounding errors are weighted
    by their effect on the outputs of these linears; without weights, all channels count equally.
    """
    if stats.num_tokens == 0:
        stats.notes.append(
            "no calibration token reached this linear: its input scale is 1, a guess"
        )
        return 1.0
    largest = float(stats.absmax_K.max())
    if largest == 0:
        stats.notes.append(
            "only zeros reached this linear: its input scale is the smallest possible"
        )
    divisor = NVFP4_LARGEST if activation.bits == 4 else LARGEST[activation.type]
    full = max(largest / divisor, MIN_INPUT_SCALE)
    # Float8 has the same relative precision at any scale, so clipping does not help.
    if activation.type != "int" or largest == 0:
        return full
    sample_TK = stats.sample()
    weight_K = torch.ones_like(sample_TK[0])
    if weights:
        weight_K = sum(weight.float().square().sum(0) for weight in weights)
    best = min(FRACTIONS, key=lambda fraction: rounding_error(sample_TK, full * fraction, weight_K))
    return max(full * best, MIN_INPUT_SCALE)


def is_starved(stats: InputStatistics) -> bool:
    """Return True if the data does not determine an input: no token, or only zeros, reached it."""
    return stats.num_tokens == 0 or not bool(stats.absmax_K.any())


def rounding_error(sample_TK: torch.Tensor, scale: float, weight_K: torch.Tensor) -> float:
    """Squared error of the sample rounded to int8, weighted per input."""
    difference_TK = round_static(sample_TK, scale) - sample_TK
    return float((difference_TK.square().sum(0) * weight_K).double().sum())


def round_static(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Round to int8 and back, as a kernel with a static scale does."""
    if isinstance(scale, torch.Tensor):
        scale = scale.to(x.device)
    codes = (x.float() / scale).round_().clamp_(-128, 127)
    return (codes * scale).to(x.dtype)
