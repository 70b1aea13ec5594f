"""The range of a static activation: one scale for all that a linear will ever read.

The largest value of the data would be the safe choice and is a poor one: a few tokens reach far out
and every other is then rounded coarsely. Here the scale is the one with the least squared error of
the linears' outputs on a sample of the data; what lies beyond is clipped. Knows no linear.
Legend: T tokens, K inputs, N outputs.
"""

from collections.abc import Sequence

import torch

from calibrate.statistics import InputStatistics
from formats.activation import LARGEST, MIN_INPUT_SCALE
from formats.scheme import ActivationSpec

# Fractions of the largest value that are tried: down to a fiftieth of it.
FRACTIONS = tuple(0.88**i for i in range(31))


def static_scale(
    stats: InputStatistics, activation: ActivationSpec, weights: Sequence[torch.Tensor] = ()
) -> float:
    """The scale for one input. `weights` [N, K] are those of all linears that read it: an error
    counts as much as it moves their outputs; without any, all inputs count alike."""
    if stats.num_tokens == 0:
        stats.notes.append("no calibration token reached it: its input's scale is a guess, 1")
        return 1.0
    largest = float(stats.absmax_K.max())
    full = max(largest / LARGEST[activation.type], MIN_INPUT_SCALE)
    if activation.type != "int" or largest == 0:  # float8 is as fine near zero whatever the scale
        return full
    sample_TK = stats.sample()
    weight_K = torch.ones_like(sample_TK[0])
    if weights:
        weight_K = sum(weight.float().square().sum(0) for weight in weights)
    best = min(FRACTIONS, key=lambda fraction: rounding_error(sample_TK, full * fraction, weight_K))
    return max(full * best, MIN_INPUT_SCALE)


def rounding_error(sample_TK: torch.Tensor, scale: float, weight_K: torch.Tensor) -> float:
    """Squared error of the sample rounded to int8, each input weighed."""
    difference_TK = round_static(sample_TK, scale) - sample_TK
    return float((difference_TK.square().sum(0) * weight_K).double().sum())


def round_static(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """To int8 and back, as a kernel with a static scale does."""
    if isinstance(scale, torch.Tensor):
        scale = scale.to(x.device)
    codes = (x.float() / scale).round_().clamp_(-128, 127)
    return (codes * scale).to(x.dtype)
