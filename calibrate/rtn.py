"""Round to nearest: the solver that looks at the weight alone. Needs no calibration data."""

import torch

from formats.packed import PackedWeight
from formats.scheme import QuantSpec


def solve(weight_NK: torch.Tensor, spec: QuantSpec, name: str) -> PackedWeight:
    """Quantize one linear's weight. Raises CheckpointError, with `name`, on NaN or infinity."""
    return PackedWeight.from_float(weight_NK, spec, name)
