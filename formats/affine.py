"""The one rounding rule: float weights <-> codes. Every other part of the project calls it.

    w ~ s * (q - z)        q = clamp(round(w / s) + z, 0, 2^b - 1)

Legend: N outputs, K inputs, G groups, L = K / G inputs of a group. Rounding is half to even, in
float32. Scales are rounded to float16 first, since that is what a checkpoint stores, and codes are
chosen for the stored scale. Symmetric scales may be negative: the extreme weight then takes code 0,
the longer side.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from formats.errors import CheckpointError, RangeError, SchemeError
from formats.scheme import QuantSpec

SCALE_DTYPE = torch.float16
# Smallest magnitude a scale may have: 16 steps of float16's smallest number, so that rounding the
# scale moves it by less than 1/32. Largest: float16's largest.
MIN_SCALE = 2.0**-20
MAX_SCALE = 65504.0
# Steps that the largest weight of all must be away from 0 at least, or as many as its bits give.
LEAST_STEPS = 8
# Fractions of the full range that the search tries. A smaller range clips the extreme weights of a
# group and rounds all others finer.
SHRINK_FACTORS = tuple(1 - 0.03 * i for i in range(13))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What a scale method tries: fractions of the full range, and sides of a symmetric grid."""

    shrinks: tuple[float, ...] = (1.0,)
    long_side: bool = False  # the extreme weight on code 0; the scale may then be negative
    short_side: bool = False  # the extreme weight on the code nearer to the middle, or on the last


SCALE_METHODS: dict[str, Ranges] = {
    "absmax": Ranges(short_side=True),
    "full-range": Ranges(long_side=True),
    "mse": Ranges(shrinks=SHRINK_FACTORS, long_side=True, short_side=True),
}
DEFAULT_METHOD = "mse"
OUT_OF_RANGE = "leave it in float (--ignore), or use a float8 scheme, whose scales are float32"
# Rows are searched in blocks of about this many weights, so that memory stays bounded.
BLOCK_ELEMENTS = 2**22


def choose_scales(
    weight_NK: torch.Tensor,
    spec: QuantSpec,
    name: str = "weight",
    *,
    method: str = DEFAULT_METHOD,
    importance_K: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each group's scale and zero by least squared error. Returns (scales_NG, zeros_NG).

    `method` is a row of SCALE_METHODS: the ranges to try. `importance_K` weighs the errors, such as
    the mean square of each input in calibration data ("imatrix"); None: all alike.

    Scales are float16 and never zero; zeros are uint8 in code units, 2^(b-1) throughout for a
    symmetric spec. An all-zero group gets scale 1. A group that would need a scale below MIN_SCALE
    gets that one, and is rounded more coarsely (calibrate reports it). Raises CheckpointError, with
    `name`, on NaN or infinity; RangeError where a group is too large for a scale, or all too small.
    """
    if weight_NK.ndim != 2 or not weight_NK.is_floating_point():
        raise CheckpointError(
            name,
            f"expected a float weight [N, K], found {weight_NK.dtype} {list(weight_NK.shape)}",
        )
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
            raise SchemeError(name, "the importance of its inputs must be finite, 0 or more")
        # Where no input of a group matters, all of them do.
        importance_GL = importance_GL + (importance_GL.sum(1, keepdim=True) == 0)
    rows = max(1, BLOCK_ELEMENTS // in_features)
    scales, zeros, widest = [], [], 0.0
    for block in weight_NK.split(rows):
        groups_NGL = block.float().unflatten(1, (num_groups, -1))
        if not torch.isfinite(groups_NGL).all():
            raise CheckpointError(name, "its weights contain NaN or infinity", "mend the model")
        widest = max(widest, _check_not_above(groups_NGL, spec, name, method))
        scale_NG, zero_NG = search(groups_NGL, spec, importance_GL, method)
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
    """What choose_scales does for weights that it has checked; nothing waits for a GPU here."""
    best_scale, best_zero, best_error = None, None, None
    for scale_NG, zero_NG in _candidates(groups_NGL, spec, method):
        stored_NG = _storable(scale_NG)
        step_NG1, zero_NG1 = stored_NG.float()[..., None], zero_NG[..., None]
        codes = (groups_NGL / step_NG1).round_().add_(zero_NG1).clamp_(0, spec.max_code)
        error_NGL = codes.sub_(zero_NG1).mul_(step_NG1).sub_(groups_NGL).square_()
        if importance_GL is not None:
            error_NGL.mul_(importance_GL)
        error_NG = error_NGL.sum(-1)
        if best_error is None:  # the full range
            best_scale, best_zero, best_error = stored_NG, zero_NG, error_NG
            continue
        better_NG = error_NG < best_error
        best_scale = torch.where(better_NG, stored_NG, best_scale)
        best_zero = torch.where(better_NG, zero_NG, best_zero)
        best_error = torch.where(better_NG, error_NG, best_error)
    return best_scale, best_zero.to(torch.uint8)


def _candidates(
    groups_NGL: torch.Tensor, spec: QuantSpec, method: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(scales, zeros) to try, each [N, G], the full range first."""
    find = _symmetric if spec.symmetric else _asymmetric
    return find(groups_NGL, spec, SCALE_METHODS[method])


def _check_not_above(groups_NGL: torch.Tensor, spec: QuantSpec, name: str, method: str) -> float:
    """The largest scale. Raises RangeError where a checkpoint cannot store it."""
    scale_NG, _ = next(_candidates(groups_NGL, spec, method))
    widest = float(scale_NG.abs().max())
    if widest > MAX_SCALE:
        raise RangeError(
            name,
            f"its largest weight is {float(groups_NGL.abs().max()):.3g}, which needs a scale of"
            f" {widest:.3g}; scales are stored in float16, which ends at {MAX_SCALE:.0f}",
            OUT_OF_RANGE,
        )
    return widest


def _check_not_below(widest: float, weight_NK: torch.Tensor, spec: QuantSpec, name: str) -> None:
    """Raise RangeError where even the largest scale of a weight is too small to be stored."""
    side = 2 ** (spec.bits - 1)
    if 0 < widest * side < MIN_SCALE * min(side, LEAST_STEPS):
        raise RangeError(
            name,
            f"its largest weight is {float(weight_NK.abs().max()):.3g}, which needs a scale of"
            f" {widest:.3g}; scales are stored in float16, which gets coarse below {MIN_SCALE:.3g}",
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
    """Ranges around the middle code: the extreme weight on its long side (code 0) or its short."""
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
    """Ranges from the smallest to the largest weight, always with 0 inside."""
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
    """Codes to float32 weights [N, K]: s * (q - z), exact but for one rounding."""
    groups_NGL = codes_NK.float().unflatten(1, (scales_NG.shape[1], -1))
    groups_NGL.sub_(zeros_NG.float()[..., None]).mul_(scales_NG.float()[..., None])
    return groups_NGL.flatten(1)


def off_grid(
    weight_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor, spec: QuantSpec
) -> float:
    """The largest distance of a weight from the nearest point of the given grid, in steps.

    A step is the scale of the weight's group. 0: every weight lies on the grid, and rounding it
    changes nothing. Up to 0.5: rounding moves it; more: it lies outside of the grid's range and is
    clipped. Weights that somebody computed in float32 as s * (q - z) are within 1e-5. Raises
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
        )
    if not torch.isfinite(weight_NK).all():
        raise CheckpointError("weight", "contains NaN or infinity", "mend the model")
    groups_NGL = weight_NK.float().unflatten(1, (scales_NG.shape[1], -1))
    places = groups_NGL / scales_NG.float()[..., None]
    zeros_NG1 = zeros_NG.float()[..., None]
    nearest = places.round().clamp(-zeros_NG1, spec.max_code - zeros_NG1)
    return float((places - nearest).abs().max())
