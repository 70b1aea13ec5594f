"""The project's only rounding rule between float weights and integer codes.

    w ~ s * (q - z)        q = clamp(round(w / s) + z, 0, 2^b - 1)

Legend: N outputs, K inputs, G groups, L = K / G inputs of a group. Rounding is half to even, in
float32. Scales are rounded to float16 first, as checkpoints store them, and codes are chosen for
the rounded scale. A symmetric scale may be negative: this puts the extreme weight on code 0, where
the range has one more step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from formats.errors import CheckpointError, RangeError, SchemeError
from formats.numerics.finite import check_finite, check_matrix
from formats.numerics.multiples import nearest_multiples, units_of
from formats.scheme import QuantSpec

SCALE_DTYPE = torch.float16
# Smallest scale: 16 times float16's smallest number, so that rounding moves it by less than 1/32.
# Largest scale: float16's largest number.
MIN_SCALE = 2.0**-20
MAX_SCALE = 65504.0
# The largest weight must be at least this many steps from 0, or as many as its bits allow.
MIN_STEPS = 8
# Fractions of the full range that the search tries. A smaller range clips a group's extreme weights
# and rounds the others more finely.
SHRINK_FACTORS = tuple(1 - 0.03 * i for i in range(13))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Candidates of a scale method: fractions of the full range, and sides of a symmetric grid."""

    shrinks: tuple[float, ...] = (1.0,)
    long_side: bool = False  # put the extreme weight on code 0; the scale may be negative
    short_side: bool = False  # put the extreme weight on the last code


SCALE_METHODS: dict[str, Ranges] = {
    "absmax": Ranges(short_side=True),
    "full-range": Ranges(long_side=True),
    "mse": Ranges(shrinks=SHRINK_FACTORS, long_side=True, short_side=True),
}
DEFAULT_METHOD = "mse"
OUT_OF_RANGE = "leave it in float (`ignore`), or use a float8 scheme (its scales are float32)"
# Units that are tried if scales of a row are multiples of one number: these factors of a fifteenth
# of the row's largest scale. Squared errors of docs-5m's weights in groups of 128, compared with
# free scales: 1.3 % more with the first factor alone, 0.9 % with these, 0.9 % with 16 factors.
UNIT_FACTORS = (1.0, 1.03, 0.97, 0.94)
# Rows are rounded in blocks of about this many weights, so that memory stays bounded. On a GPU a
# search launches 450 kernels per block, which for 2^22 weights takes longer than to run them.
BLOCK_ELEMENTS = 2**22
BLOCK_ELEMENTS_ON_GPU = 2**24

# Float32 sums of errors that differ by less than this fraction are compared in float64.
CLOSE = 1e-5


def rows_at_once(in_features: int, device: torch.device | None = None) -> int:
    """Return the number of rows that are rounded together."""
    on_gpu = device is not None and device.type == "cuda"
    return max(1, (BLOCK_ELEMENTS_ON_GPU if on_gpu else BLOCK_ELEMENTS) // max(1, in_features))


def choose_scales(
    weight_NK: torch.Tensor,
    spec: QuantSpec,
    name: str = "weight",
    *,
    method: str = DEFAULT_METHOD,
    importance_K: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each group's scale and zero by least squared error; return (scales_NG, zeros_NG).

    `method` is a key of SCALE_METHODS, which lists the ranges to try. `importance_K` weights the
    errors, for example by each input's mean square in calibration data ("imatrix"); None: equal
    weights.

    Scales are float16 and never zero; zeros are uint8 in code units, 2^(b-1) throughout for a
    symmetric spec. An all-zero group gets scale 1. A group that needs a scale below MIN_SCALE gets
    MIN_SCALE and is rounded more coarsely (calibrate reports it). Raises CheckpointError, with
    `name`, on NaN or infinity; RangeError if a group is too large for a scale or every group is too
    small.
    """
    check_matrix(name, weight_NK)
    out_features, in_features = weight_NK.shape
    spec.check_shape(name, out_features, in_features)
    if method not in SCALE_METHODS:
        raise SchemeError(
            f"scale method {method!r}", "unknown", f"known: {', '.join(SCALE_METHODS)}"
        )
    num_groups = spec.num_groups(in_features)
    importance_GL = None
    if importance_K is not None:
        importance_GL = importance_K.float().view(num_groups, -1)
        if not torch.isfinite(importance_GL).all() or (importance_GL < 0).any():
            raise SchemeError(
                name,
                "the importance of its inputs must be finite, 0 or more",
                "calibrate on other texts, or round without importances",
            )
        # a group whose inputs all have importance 0 uses equal weights
        importance_GL = importance_GL + (importance_GL.sum(1, keepdim=True) == 0)
    check_finite(name, weight_NK)
    scales, zeros, widest = [], [], 0.0
    for block in weight_NK.split(rows_at_once(in_features, weight_NK.device)):
        groups_NGL = block.float().unflatten(1, (num_groups, -1))
        widest = max(widest, _check_not_above(groups_NGL, spec, name, method))
        scale_NG, zero_NG = search(groups_NGL, spec, importance_GL, method)
        if spec.in_multiples and num_groups > 1:
            scale_NG = _in_multiples(groups_NGL, scale_NG, spec, importance_GL)
        scales.append(scale_NG)
        zeros.append(zero_NG)
    _check_not_below(widest, weight_NK, spec, name)
    return torch.cat(scales), torch.cat(zeros)


def search(
    groups_NGL: torch.Tensor,
    spec: QuantSpec,
    importance_GL: torch.Tensor | None = None,
    method: str = DEFAULT_METHOD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search without checks, for choose_scales; never synchronizes with a GPU.

    Every device makes the same choice: errors are compared as float64 sums. On a CPU this is done
    only where float32 sums, whose order of addition differs between devices, leave a doubt.
    """
    on_cpu = groups_NGL.device.type == "cpu"
    sum_dtype = torch.float32 if on_cpu else torch.float64
    best_scale, best_zero, best_error = None, None, None
    for scale_NG, zero_NG in _candidates(groups_NGL, spec, method):
        stored_NG = _storable(scale_NG)
        error_NGL = _errors(groups_NGL, stored_NG, zero_NG, spec, importance_GL)
        error_NG = _sums(error_NGL, sum_dtype)
        if best_error is None:  # the full range
            best_scale, best_zero, best_error = stored_NG, zero_NG, error_NG
            continue
        better_NG = error_NG < best_error
        close_NG = (error_NG - best_error).abs() <= CLOSE * best_error if on_cpu else None
        if close_NG is not None and close_NG.any():
            n, g = torch.nonzero(close_NG, as_tuple=True)
            importance_XL = None if importance_GL is None else importance_GL[g]
            found, best = (
                _errors(groups_NGL[n, g], scale[n, g], zero[n, g], spec, importance_XL)
                for scale, zero in ((stored_NG, zero_NG), (best_scale, best_zero))
            )
            better_NG[n, g] = _sums(found, torch.float64) < _sums(best, torch.float64)
        best_scale = torch.where(better_NG, stored_NG, best_scale)
        best_zero = torch.where(better_NG, zero_NG, best_zero)
        best_error = torch.where(better_NG, error_NG, best_error)
    return best_scale, best_zero.to(torch.uint8)


def _in_multiples(
    groups_NGL: torch.Tensor,
    scale_NG: torch.Tensor,
    spec: QuantSpec,
    importance_GL: torch.Tensor | None,
) -> torch.Tensor:
    """Return scales that in each row are multiples of the unit with the least squared error."""
    used_NG = groups_NGL.abs().amax(-1) > 0  # the other groups have scale 1
    used_NG = torch.where(used_NG, scale_NG, 0)
    used_NG = torch.where((used_NG == 0).all(1, keepdim=True), scale_NG, used_NG)
    best, best_error = None, None
    for factor in UNIT_FACTORS:
        units_N1 = units_of(used_NG, factor)
        found, error = on_multiples(groups_NGL, scale_NG, units_N1, spec, importance_GL)
        error_N1 = error.sum(1, keepdim=True)
        if best is None:
            best, best_error = found, error_N1
            continue
        best = torch.where(error_N1 < best_error, found, best)
        best_error = torch.minimum(error_N1, best_error)
    return best


def on_multiples(
    groups_NGL: torch.Tensor,
    scale_NG: torch.Tensor,
    units_N1: torch.Tensor,
    spec: QuantSpec,
    importance_GL: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales that are whole multiples of the rows' units, and the groups' squared errors.

    Of the three multiples next to a scale, the one with the least error is chosen. For a symmetric
    spec.
    """
    zero = torch.tensor(float(spec.symmetric_zero), device=groups_NGL.device)
    best, best_error = None, None
    for shift in (0, -1, 1):
        found = nearest_multiples(scale_NG.double() + shift * units_N1.copysign(scale_NG), units_N1)
        found = found.to(scale_NG.dtype)
        error = _sums(_errors(groups_NGL, found, zero, spec, importance_GL), torch.float64)
        if best is None:
            best, best_error = found, error
            continue
        better = error < best_error
        best = torch.where(better, found, best)
        best_error = torch.where(better, error, best_error)
    return best, best_error


def _sums(errors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of each group's errors."""
    return errors.sum(-1, dtype=dtype)


def _errors(
    groups: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    spec: QuantSpec,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Return squared rounding errors of groups [..., L] with scales and zeros [...]."""
    step, zero = scale.float()[..., None], zero[..., None]
    codes = (groups / step).round_().add_(zero).clamp_(0, spec.max_code)
    error = codes.sub_(zero).mul_(step).sub_(groups).square_()
    return error if importance is None else error.mul_(importance)


def _candidates(
    groups_NGL: torch.Tensor, spec: QuantSpec, method: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield candidate (scales, zeros), each [N, G], the full range first."""
    find = _symmetric if spec.symmetric else _asymmetric
    return find(groups_NGL, spec, SCALE_METHODS[method])


def _check_not_above(groups_NGL: torch.Tensor, spec: QuantSpec, name: str, method: str) -> float:
    """Return the largest scale. Raises RangeError if a checkpoint cannot store it."""
    scale_NG, _ = next(_candidates(groups_NGL, spec, method))
    widest = float(scale_NG.abs().max())
    if widest > MAX_SCALE:
        raise RangeError(
            name,
            f"its largest weight is {float(groups_NGL.abs().max()):.3g}, which needs a scale of"
            f" {widest:.3g}; scales are stored in float16, whose largest value is {MAX_SCALE:.0f}",
            OUT_OF_RANGE,
        )
    return widest


def _check_not_below(widest: float, weight_NK: torch.Tensor, spec: QuantSpec, name: str) -> None:
    """Raise RangeError if even the weight's largest scale is too small to store."""
    side = 2 ** (spec.bits - 1)
    if 0 < widest * side < MIN_SCALE * min(side, MIN_STEPS):
        raise RangeError(
            name,
            f"its largest weight is {float(weight_NK.abs().max()):.3g}, which needs a scale of"
            f" {widest:.3g}; float16 scales are too coarse below {MIN_SCALE:.3g}",
            OUT_OF_RANGE,
        )


def _storable(scale_NG: torch.Tensor) -> torch.Tensor:
    """Round scales to what a checkpoint stores; an all-zero group (scale 0) gets 1."""
    magnitude = scale_NG.abs().clamp(MIN_SCALE, MAX_SCALE)
    stored = torch.where(scale_NG < 0, -magnitude, magnitude)
    return torch.where(scale_NG == 0, 1.0, stored).to(SCALE_DTYPE)


def _symmetric(
    groups_NGL: torch.Tensor, spec: QuantSpec, ranges: Ranges
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield candidates around the middle code; the extreme weight is on code 0 or the last code."""
    half = spec.symmetric_zero
    position = groups_NGL.abs().argmax(-1, keepdim=True)
    extreme_NG = groups_NGL.gather(-1, position).squeeze(-1)
    zero_NG = torch.full_like(extreme_NG, half)
    for shrink in ranges.shrinks:
        if ranges.long_side:
            yield -extreme_NG * (shrink / half), zero_NG
        if ranges.short_side:
            yield extreme_NG * (shrink / (half - 1)), zero_NG


def _asymmetric(
    groups_NGL: torch.Tensor, spec: QuantSpec, ranges: Ranges
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield candidates from the smallest to the largest weight; the range always includes 0."""
    low_NG = groups_NGL.amin(-1).clamp(max=0)
    high_NG = groups_NGL.amax(-1).clamp(min=0)
    for shrink in ranges.shrinks:
        scale_NG = (high_NG - low_NG) * (shrink / spec.max_code)
        step_NG = _storable(scale_NG).float()
        zero_NG = (-low_NG * shrink / step_NG).round().clamp(0, spec.max_code)
        yield scale_NG, zero_NG


def quantize(
    weight_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor, spec: QuantSpec
) -> torch.Tensor:
    """Round weights to uint8 codes [N, K] on the given grid."""
    groups_NGL = weight_NK.float().unflatten(1, (scales_NG.shape[1], -1))
    codes = (groups_NGL / scales_NG.float()[..., None]).round_()
    codes.add_(zeros_NG[..., None]).clamp_(0, spec.max_code)
    return codes.to(torch.uint8).flatten(1)


def dequantize(
    codes_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor
) -> torch.Tensor:
    """Convert codes to float32 weights [N, K]: s * (q - z), with a single rounding."""
    groups_NGL = codes_NK.float().unflatten(1, (scales_NG.shape[1], -1))
    groups_NGL.sub_(zeros_NG.float()[..., None]).mul_(scales_NG.float()[..., None])
    return groups_NGL.flatten(1)


def off_grid(
    weight_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor, spec: QuantSpec
) -> float:
    """Return the largest distance of a weight from the nearest grid point, in grid steps.

    A step is the scale of the weight's group. At 0, every weight lies on the grid and rounding
    changes nothing. Up to 0.5, rounding moves a weight. Above 0.5, a weight is outside the grid's
    range and is clipped. Weights that were computed in float32 as s * (q - z) are at 0. Raises
    CheckpointError on NaN, infinity or another shape.
    """
    weight_NK = weight_NK.detach()
    num_groups = scales_NG.shape[1]
    fits = weight_NK.ndim == 2 and weight_NK.shape[0] == scales_NG.shape[0]
    length = spec.group_length(weight_NK.shape[1]) if fits else 0
    if not fits or num_groups * length != weight_NK.shape[1]:
        raise CheckpointError(
            "weight",
            f"{list(weight_NK.shape)} does not fit a grid of {list(scales_NG.shape)} scales",
            "pass weights of the layer that the scales belong to",
        )
    check_finite("weight", weight_NK)
    groups_NGL = weight_NK.float().unflatten(1, (scales_NG.shape[1], -1))
    scales_NG1, zeros_NG1 = scales_NG.float()[..., None], zeros_NG.float()[..., None]
    nearest = (groups_NGL / scales_NG1).round().clamp(-zeros_NG1, spec.max_code - zeros_NG1)
    return float(((groups_NGL - scales_NG1 * nearest) / scales_NG1).abs().max())
