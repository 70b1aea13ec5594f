"""Round to nearest: solvers without error compensation."""

import torch

from calibrate.calibration.statistics import InputStatistics
from calibrate.solvers.solving import MORE_DATA, SolverError
from formats.in_memory.fp4 import Fp4Weight, is_fp4
from formats.in_memory.k_weight import KWeight, is_k_quant
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight, round_to_nearest
from formats.numerics import affine
from formats.scheme import QuantSpec


def solve(
    weight_NK: torch.Tensor, stats: InputStatistics | None, spec: QuantSpec, name: str
) -> Weight:
    """Round one linear's weight to nearest. `stats` is not used. Raises CheckpointError on NaN."""
    return round_to_nearest(weight_NK, spec, name)


def solve_weighted(
    weight_NK: torch.Tensor, stats: InputStatistics | None, spec: QuantSpec, name: str
) -> Weight:
    """Round to nearest, with scales that minimize errors weighted by mean square input ("imatrix").

    Raises SolverError if no token reached the linear.
    """
    if stats is None or stats.num_tokens == 0:
        raise SolverError(name, "no calibration token reached it", MORE_DATA)
    importance_K = stats.importance_K
    if is_k_quant(spec):
        return KWeight.from_float(weight_NK, spec, name, importance_K)
    if is_fp4(spec):
        return Fp4Weight.from_float(weight_NK, spec, name, importance_K)
    scales_NG, zeros_NG = affine.choose_scales(weight_NK, spec, name, importance_K=importance_K)
    codes_NK = affine.quantize(weight_NK, scales_NG, zeros_NG, spec)
    return PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)
