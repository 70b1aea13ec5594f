"""Round to nearest: the solver that leaves every weight where it is, but for rounding."""

import torch

from calibrate.solving import SolverError
from calibrate.statistics import InputStatistics
from formats import affine
from formats.packed import PackedWeight
from formats.scheme import QuantSpec
from formats.weights import Weight, round_to_nearest


def solve(
    weight_NK: torch.Tensor, stats: InputStatistics | None, spec: QuantSpec, name: str
) -> Weight:
    """Quantize one linear's weight; reads no statistics. Raises CheckpointError on NaN."""
    return round_to_nearest(weight_NK, spec, name)


def solve_weighted(
    weight_NK: torch.Tensor, stats: InputStatistics | None, spec: QuantSpec, name: str
) -> PackedWeight:
    """The same with scales whose search weighs each input by its mean square ("imatrix").

    Raises SolverError where no token reached the linear.
    """
    if stats is None or stats.num_tokens == 0:
        raise SolverError(name, "no calibration token reached it")
    importance_K = stats.importance_K
    scales_NG, zeros_NG = affine.choose_scales(weight_NK, spec, name, importance_K=importance_K)
    codes_NK = affine.quantize(weight_NK, scales_NG, zeros_NG, spec)
    return PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)
