"""Search of the scales and minima of K-quants by least squared error.

As in llama.cpp (make_qkx2_quants, make_qx_quants), each group tries several ranges, and the codes
of a range determine the scale and minimum that fit them best. Unlike llama.cpp, errors are weighted
equally or by the inputs' importance, and the integers of a block are searched again after d and
dmin are rounded. A block keeps the plain range of its weights if that is better. Legend: N outputs,
K inputs, G groups of a row, L inputs of a group, B blocks of a row.
"""

from dataclasses import replace

import torch

from formats.errors import RangeError, SchemeError
from formats.gguf.k_quants.grid import KGrid, nearest_codes
from formats.numerics.affine import MAX_SCALE, OUT_OF_RANGE, rows_at_once
from formats.numerics.finite import check_finite
from formats.scheme import K_BLOCK, QuantSpec

Q6_ZERO = 32  # code of the weight 0 in Q6_K
LAST_SCALE = 63  # largest scale of Q4_K and Q5_K
SMALLEST = 2.0**-24  # smallest positive float16
# Least importance of an input, as a fraction of the largest in its group: in float32 sums of
# squares, a single input must not hide the others.
MIN_IMPORTANCE = 1e-4
# Changes of the number of steps in a group's range that the search tries
RANGES_WITH_MINIMA = tuple(-1 + 0.1 * i for i in range(21))
RANGES = tuple(0.1 * i for i in range(-9, 10))
_NEAR = (-1, 0, 1)  # changes of a scale or minimum that the last pass tries


def choose_grid(
    weight_NK: torch.Tensor,
    spec: QuantSpec,
    name: str = "weight",
    importance_K: torch.Tensor | None = None,
) -> KGrid:
    """Choose the grid of a K-quant for a weight; `importance_K` None: equal weights.

    Raises CheckpointError, with `name`, on NaN or infinity; SchemeError if blocks do not divide the
    inputs; RangeError if a block is too large for a float16 scale.
    """
    spec.check_shape(name, *weight_NK.shape)
    importance_GL = None
    if importance_K is not None:
        importance_GL = importance_K.float().view(-1, spec.integer_form.group_size)
        if not torch.isfinite(importance_GL).all() or (importance_GL < 0).any():
            raise SchemeError(
                name,
                "the importance of its inputs must be finite, 0 or more",
                "make the importance file again from texts that give no NaN",
            )
        largest_G1 = importance_GL.amax(1, keepdim=True)
        importance_GL = importance_GL.clamp(min=MIN_IMPORTANCE * largest_G1) + (largest_G1 == 0)
    check_finite(name, weight_NK)
    parts = []
    for part_NK in weight_NK.split(rows_at_once(weight_NK.shape[1])):
        groups_NGL = part_NK.float().unflatten(1, (-1, spec.integer_form.group_size))
        parts.append(_choose(groups_NGL, spec, importance_GL))
        if not (torch.isfinite(parts[-1].d_NB).all() and torch.isfinite(parts[-1].dmin_NB).all()):
            raise RangeError(
                name,
                f"its largest weight is {float(part_NK.abs().max()):.3g}, which is too large for"
                f" the float16 scales of {spec.type} (up to {MAX_SCALE:.0f})",
                OUT_OF_RANGE,
            )
    return KGrid.merge(parts)


def _choose(groups_NGL: torch.Tensor, spec: QuantSpec, importance_GL: torch.Tensor | None) -> KGrid:
    """Return the better of the searched and the plain grid, block by block."""
    search, plain = (_affine, _affine_range) if not spec.symmetric else (_scaled, _scaled_range)
    found = _refined(
        _rounded(*search(groups_NGL, spec.max_code, importance_GL), spec),
        groups_NGL,
        importance_GL,
    )
    simple = _rounded(*plain(groups_NGL, spec.max_code), spec)
    errors = [
        error_of(each, groups_NGL, importance_GL).unflatten(1, (found.d_NB.shape[1], -1)).sum(-1)
        for each in (found, simple)
    ]
    return _where(errors[0] <= errors[1], found, simple)


def error_of(
    grid: KGrid, groups_NGL: torch.Tensor, importance_GL: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the squared error of each group after rounding to nearest, [N, G]."""
    steps_NG1, lows_NG1 = grid.steps()[..., None], grid.lows()[..., None]
    codes_NGL = nearest_codes(groups_NGL, steps_NG1, lows_NG1, grid.spec.max_code)
    error_NGL = codes_NGL.float().mul_(steps_NG1).sub_(lows_NG1).sub_(groups_NGL).square_()
    return (error_NGL if importance_GL is None else error_NGL.mul_(importance_GL)).sum(-1)


def _affine_range(groups_NGL: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (steps, lows) that spread the codes from the smallest weight, or 0, to the largest."""
    low_NG = groups_NGL.amin(-1).clamp(max=0)
    return (groups_NGL.amax(-1) - low_NG) / last, -low_NG


def _affine(
    groups_NGL: torch.Tensor, last: int, importance_GL: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the searched (steps, lows), [N, G] each; lows are at least 0."""
    step_NG, low_NG = _affine_range(groups_NGL, last)
    width_NG = step_NG * last
    weights = torch.ones_like(groups_NGL[:1]) if importance_GL is None else importance_GL[None]
    weighted_NGL = groups_NGL * weights
    sum_w, sum_x = weights.sum(-1), weighted_NGL.sum(-1)
    best_NG = torch.full_like(step_NG, torch.inf)
    found_step, found_low = step_NG, low_NG
    shifted_NGL = groups_NGL + low_NG[..., None]
    for change in RANGES_WITH_MINIMA:
        codes = shifted_NGL * ((last + change) / _no_zero(width_NG))[..., None]
        codes = codes.round_().clamp_(0, last)
        sum_xl = (codes * weighted_NGL).sum(-1)
        weighted_codes = codes * weights
        sum_l, sum_l2 = weighted_codes.sum(-1), weighted_codes.mul_(codes).sum(-1)
        # least squares of step · code − low, with a low of at least 0
        determinant = sum_w * sum_l2 - sum_l.square()
        step = (sum_w * sum_xl - sum_x * sum_l) / determinant
        low = (sum_l * sum_xl - sum_l2 * sum_x) / determinant
        step = torch.where(low < 0, sum_xl / _no_zero(sum_l2), step)
        low = low.clamp(min=0)
        # squared error minus the sum of squares of the weights
        error = step.square() * sum_l2 + low.square() * sum_w - 2 * step * low * sum_l
        error += 2 * low * sum_x - 2 * step * sum_xl
        better = (determinant > 0) & (step > 0) & (error < best_NG)
        best_NG = torch.where(better, error, best_NG)
        found_step = torch.where(better, step, found_step)
        found_low = torch.where(better, low, found_low)
    return found_step, found_low


def _scaled_range(groups_NGL: torch.Tensor, last: int) -> tuple[torch.Tensor, None]:
    """Return steps with the weight of largest magnitude on code 0."""
    position = groups_NGL.abs().argmax(-1, keepdim=True)
    return groups_NGL.gather(-1, position).squeeze(-1) / -Q6_ZERO, None


def _scaled(
    groups_NGL: torch.Tensor, last: int, importance_GL: torch.Tensor | None
) -> tuple[torch.Tensor, None]:
    """Return the searched steps [N, G], which may be negative."""
    step_NG, _ = _scaled_range(groups_NGL, last)
    weights = torch.ones_like(groups_NGL[:1]) if importance_GL is None else importance_GL[None]
    best_NG, found_NG = torch.zeros_like(step_NG), step_NG
    for change in RANGES:
        factor = (1 + change / Q6_ZERO) / _no_zero(step_NG)
        codes = (groups_NGL * factor[..., None]).round_().clamp_(-Q6_ZERO, last - Q6_ZERO)
        weighted = codes * weights
        sum_xl, sum_l2 = (weighted * groups_NGL).sum(-1), weighted.mul_(codes).sum(-1)
        gain = sum_xl.square() / _no_zero(sum_l2)  # squared error that the codes remove
        better = gain > best_NG
        best_NG = torch.where(better, gain, best_NG)
        found_NG = torch.where(better, sum_xl / _no_zero(sum_l2), found_NG)
    return found_NG, None


def _rounded(steps_NG: torch.Tensor, lows_NG: torch.Tensor | None, spec: QuantSpec) -> KGrid:
    """Round steps and lows to multiples of d and dmin of their block."""
    per_block = K_BLOCK // spec.integer_form.group_size
    if lows_NG is None:
        blocks_NBG = steps_NG.unflatten(1, (-1, per_block))
        position = blocks_NBG.abs().argmax(-1, keepdim=True)
        extreme_NB = blocks_NBG.gather(-1, position).squeeze(-1)
        d_NB, scales_NG = _multiples(steps_NG, extreme_NB / -128, -128, 127)
        none = torch.zeros_like(d_NB), torch.zeros_like(scales_NG)
        return KGrid(spec=spec, d_NB=d_NB, dmin_NB=none[0], scales_NG=scales_NG, minima_NG=none[1])
    found = []
    for values_NG in (steps_NG, lows_NG):
        largest_NB = values_NG.unflatten(1, (-1, per_block)).amax(-1)
        found.append(_multiples(values_NG, largest_NB / LAST_SCALE, 0, LAST_SCALE))
    (d_NB, scales_NG), (dmin_NB, minima_NG) = found
    return KGrid(spec=spec, d_NB=d_NB, dmin_NB=dmin_NB, scales_NG=scales_NG, minima_NG=minima_NG)


def _multiples(
    values_NG: torch.Tensor, unit_NB: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (units rounded to float16, integer multiples of these units)."""
    min_NB = unit_NB.abs().clamp(min=SMALLEST).copysign(unit_NB)
    stored_NB = torch.where(unit_NB == 0, 0.0, min_NB).to(torch.float16)
    units_NG = stored_NB.float().repeat_interleave(values_NG.shape[1] // unit_NB.shape[1], 1)
    multiples_NG = (values_NG / _no_zero(units_NG)).round_().clamp_(first, last)
    return stored_NB, torch.nan_to_num(multiples_NG).to(torch.int16)


def _refined(grid: KGrid, groups_NGL: torch.Tensor, importance_GL: torch.Tensor | None) -> KGrid:
    """Return the grid with the best of the neighboring scales and minima of each group."""
    first, last = (0, LAST_SCALE) if grid.has_minima else (-128, 127)
    best, best_NG = grid, error_of(grid, groups_NGL, importance_GL)
    for of_scale in _NEAR:
        for of_minimum in _NEAR if grid.has_minima else (0,):
            if of_scale == of_minimum == 0:
                continue
            tried = replace(
                grid,
                scales_NG=(grid.scales_NG + of_scale).clamp(first, last),
                minima_NG=(grid.minima_NG + of_minimum).clamp(0, LAST_SCALE),
            )
            error_NG = error_of(tried, groups_NGL, importance_GL)
            better_NG = error_NG < best_NG
            best_NG = torch.where(better_NG, error_NG, best_NG)
            best = replace(
                best,
                scales_NG=torch.where(better_NG, tried.scales_NG, best.scales_NG),
                minima_NG=torch.where(better_NG, tried.minima_NG, best.minima_NG),
            )
    return best


def _where(chosen_NB: torch.Tensor, yes: KGrid, no: KGrid) -> KGrid:
    """Take blocks from `yes` where `chosen_NB` is True, else from `no`."""
    chosen_NG = chosen_NB.repeat_interleave(yes.scales_NG.shape[1] // chosen_NB.shape[1], 1)
    return replace(
        yes,
        d_NB=torch.where(chosen_NB, yes.d_NB, no.d_NB),
        dmin_NB=torch.where(chosen_NB, yes.dmin_NB, no.dmin_NB),
        scales_NG=torch.where(chosen_NG, yes.scales_NG, no.scales_NG),
        minima_NG=torch.where(chosen_NG, yes.minima_NG, no.minima_NG),
    )


def _no_zero(values: torch.Tensor) -> torch.Tensor:
    """Return values with 0 replaced by 1, for use as divisors."""
    return torch.where(values == 0, 1.0, values)
