"""AWQ: enlarge the weights of inputs with large activations, so that rounding hurts them less.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2023). For each shared input the factor s =
x^r / w^(1-r) is searched over r (also with w = 1: the "duo" choice). x is the inputs' root mean
square and w the weights' mean magnitude. The error of a candidate is the error of the linears'
outputs. The best ones are left out if they enlarge it on held-out windows. The factors are folded
into the previous operator. The solver's search of scales does the clipping.
"""

import math

import torch

from calibrate.calibration.statistics import InputStatistics
from calibrate.layer_map import ScalePair
from calibrate.solvers.solving import (
    LayerContext,
    LayerState,
    Transform,
    move_scale,
    shared_by_heads,
)
from formats.errors import RangeError
from formats.numerics import affine
from formats.scheme import QuantSpec

NUM_RATIOS = 20
# One range per group and candidate: it is cheap, and hardly changes the order of candidates.
SEARCH_METHOD = "full-range"
LEFT_OUT = "without awq factors, which enlarge the output error on held-out windows"
SMALLEST = 1e-4  # relative to the largest; smaller values are noise of the data, or a dead channel


def scale_layer(
    state: LayerState, statistics: dict[str, InputStatistics], context: LayerContext
) -> LayerState:
    """Search and move the factors of every scale pair of the layer."""
    changed: LayerState = {}
    for pair in context.scale_pairs:
        current = {**state, **changed}
        stats = statistics[pair.linears[0]]
        weights = [current[f"{name}.weight"].float() for name in pair.linears]
        if stats.num_tokens == 0:
            continue
        best_K, best_error = (
            None,
            output_error(weights, torch.ones_like(weights[0][0]), stats, context.spec),
        )
        for scale_K in candidates(weights, stats, pair, context):
            error = output_error(weights, scale_K, stats, context.spec)
            if error < best_error:
                best_K, best_error = scale_K, error
        if best_K is None:
            continue
        if not helps_held_out(weights, best_K, stats, context.spec):
            stats.notes.append(LEFT_OUT)
            continue
        changed |= move_scale(current, statistics, pair, best_K, context)
    return changed


def helps_held_out(
    weights: list[torch.Tensor], scale_K: torch.Tensor, stats: InputStatistics, spec: QuantSpec
) -> bool:
    """True unless the factors enlarge the output error on held-out windows."""
    joined_NK = torch.cat(weights)

    def error(factors_K: torch.Tensor) -> float | None:
        found_NK = torch.cat([_rounded(each, factors_K, spec) for each in weights])
        return stats.held_out_error(joined_NK, found_NK)

    try:
        plain = error(torch.ones_like(scale_K))
    except RangeError:  # without factors, no checkpoint can hold the weights
        return True
    return plain is None or error(scale_K) <= plain


def candidates(
    weights: list[torch.Tensor], stats: InputStatistics, pair: ScalePair, context: LayerContext
) -> list[torch.Tensor]:
    """Candidate factors [K], each normalized to sqrt(max * min) = 1."""
    activation_K = shared_by_heads(stats.importance_K, pair, context).sqrt()
    # Plain magnitudes: they cancel factors that a model's author moved between a norm and the
    # weights.
    weight_K = shared_by_heads(torch.cat(weights).abs().mean(0), pair, context)
    if not activation_K.any() or not weight_K.any():
        return []
    activation_K = activation_K.clamp(min=float(activation_K.max()) * SMALLEST)
    weight_K = weight_K.clamp(min=float(weight_K.max()) * SMALLEST)
    found = []
    for duo in (True, False):
        for step in range(1, NUM_RATIOS + 1):
            ratio = step / NUM_RATIOS
            scale_K = activation_K**ratio
            if duo:
                scale_K = scale_K / weight_K ** (1 - ratio)
            scale_K = scale_K.clamp(min=float(scale_K.max()) * SMALLEST)
            found.append(scale_K / (scale_K.max() * scale_K.min()).sqrt())
    return found


def output_error(
    weights: list[torch.Tensor], scale_K: torch.Tensor, stats: InputStatistics, spec: QuantSpec
) -> float:
    """Squared error of the linears' outputs with weights rounded under the factors.

    Infinite if the weights leave the range of scales.
    """
    error = 0.0
    for weight_NK in weights:
        try:
            rounded_NK = _rounded(weight_NK, scale_K, spec)
        except RangeError:  # no checkpoint can hold weights with these factors
            return math.inf
        error += float(stats.squared_error(weight_NK - rounded_NK).double().sum())
    return error


def _rounded(weight_NK: torch.Tensor, scale_K: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The weight rounded under the factors, without them again. Raises RangeError."""
    scaled_NK = weight_NK * scale_K
    scales_NG, zeros_NG = affine.choose_scales(scaled_NK, spec, method=SEARCH_METHOD)
    codes_NK = affine.quantize(scaled_NK, scales_NG, zeros_NG, spec)
    return affine.dequantize(codes_NK, scales_NG, zeros_NG) / scale_K


AWQ = Transform(name="awq", on_statistics=scale_layer)
