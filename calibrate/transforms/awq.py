"""AWQ: scale up the weights of channels with large activations, to reduce their rounding error.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2023). For each input that linears share,
the factor s = x^r / w^(1-r) is searched over r, and also with w = 1 (`duo_scaling` off). x is the
root mean square of the inputs, and w the mean magnitude of the weights. Candidates are compared by
the error of the linears' outputs. The best factors are dropped if they enlarge this error on
held-out windows. Factors are folded into the previous operator. There is no separate search for
clipping: the solver's search of scales does it.
"""

import math

import torch

from calibrate.calibration.statistics import InputStatistics, evenly_spaced
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
# Candidates are compared with one scale per group (its full range): a search is costly and hardly
# changes their order.
SEARCH_METHOD = "full-range"
LEFT_OUT = "without awq factors, which enlarge the output error on held-out windows"
# Candidates are compared on evenly spaced outputs of each linear, at most this many. All candidates
# of a linear are compared on the same outputs.
MAX_OUTPUTS = 512
SMALLEST = 1e-4  # relative to the largest value; smaller ones are noise, or a dead channel


def scale_layer(
    state: LayerState, statistics: dict[str, InputStatistics], context: LayerContext
) -> LayerState:
    """Search the factors of every scale pair of the layer, and fold them into the weights."""
    changed: LayerState = {}
    for pair, names in context.rounded_pairs:
        current = {**state, **changed}
        stats = statistics[names[0]]
        weights = [current[f"{name}.weight"].float() for name in names]
        if stats.num_tokens == 0:
            continue
        sampled = [evenly_spaced(weight_NK, MAX_OUTPUTS) for weight_NK in weights]
        best_K, best_error = (
            None,
            output_error(sampled, torch.ones_like(weights[0][0]), stats, context.spec),
        )
        for scale_K in candidates(weights, stats, pair, context):
            error = output_error(sampled, scale_K, stats, context.spec)
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
    """Return True unless the factors enlarge the output error on held-out windows.

    All outputs are rounded, because those that the search left out may exceed the range of scales.
    """
    joined_NK = torch.cat(weights)

    def error(factors_K: torch.Tensor) -> float | None:
        found_NK = torch.cat([_rounded(each, factors_K, spec) for each in weights])
        return stats.held_out_error(joined_NK, found_NK)

    try:
        scaled = error(scale_K)
    except RangeError:
        return False
    try:
        plain = error(torch.ones_like(scale_K))
    except RangeError:  # without factors the weights exceed the range of scales
        return True
    return plain is None or scaled <= plain


def candidates(
    weights: list[torch.Tensor], stats: InputStatistics, pair: ScalePair, context: LayerContext
) -> list[torch.Tensor]:
    """Return candidate factors [K], each normalized to sqrt(max * min) = 1."""
    activation_K = shared_by_heads(stats.importance_K, pair, context).sqrt()
    # Not normalized per group: so factors that the model's author moved between a norm and the
    # weights cancel.
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
    """Return the squared error of the linears' outputs if weights are rounded under the factors.

    The error is infinite if the scaled weights exceed the range of scales.
    """
    error = 0.0
    for weight_NK in weights:
        try:
            rounded_NK = _rounded(weight_NK, scale_K, spec)
        except RangeError:  # with these factors the weights exceed the range of scales
            return math.inf
        error += float(stats.squared_error(weight_NK - rounded_NK).double().sum())
    return error


def _rounded(weight_NK: torch.Tensor, scale_K: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Multiply a weight by the factors, round it, and divide again. Raises RangeError."""
    scaled_NK = weight_NK * scale_K
    scales_NG, zeros_NG = affine.choose_scales(scaled_NK, spec, method=SEARCH_METHOD)
    codes_NK = affine.quantize(scaled_NK, scales_NG, zeros_NG, spec)
    return affine.dequantize(codes_NK, scales_NG, zeros_NG) / scale_K


AWQ = Transform(name="awq", on_statistics=scale_layer)
