"""Round to nearest: the solver that looks at the weight alone. Needs no calibration data."""

import torch

from formats.scheme import QuantSpec
from formats.weights import Weight, round_to_nearest


def solve(weight_NK: torch.Tensor, spec: QuantSpec, name: str) -> Weight:
    """Quantize one linear's weight. Raises CheckpointError, with `name`, on NaN or infinity."""
    return round_to_nearest(weight_NK, spec, name)
