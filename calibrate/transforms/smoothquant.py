"""SmoothQuant: move the outliers of activations into the weights, before both are rounded.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (2022). The factors are s_j = max|X_j|^alpha / max|W_j|^(1-alpha). alpha is given for the
whole model, or searched for each input to minimize the error of the rounded product on a sample of
tokens. With a scale per token, searched factors are then fitted one by one (fitting.py). The
held-out windows decide between no factors, the searched factors and the fitted factors.
"""

import math

import torch

from calibrate.calibration.activations import fake_quantize_tokens
from calibrate.calibration.input_range import FRACTIONS, round_static, rounding_error
from calibrate.calibration.statistics import InputStatistics
from calibrate.layer_map import ScalePair
from calibrate.solvers.solving import (
    LayerContext,
    LayerState,
    Transform,
    move_scale,
    shared_by_heads,
)
from calibrate.transforms.fitting import fit_factors, normalized, token_weights
from formats.errors import RangeError
from formats.numerics import affine
from formats.numerics.activation import LARGEST
from formats.scheme import QuantSpec

ALPHAS = tuple(i / 10 for i in range(11))
SEARCH_METHOD = "full-range"
MAX_FACTOR = 1e4
LEFT_OUT = "without smoothquant factors, which enlarge the output error on held-out windows"


def smooth_layer(
    state: LayerState,
    statistics: dict[str, InputStatistics],
    context: LayerContext,
    alpha: float | None = None,
) -> LayerState:
    """Move the factors of every scale pair of the layer.

    If activations are not rounded, only pairs whose `previous` is a norm. `alpha` None: search it
    for each input, then fit the factors.
    """
    changed: LayerState = {}
    for pair, names in context.rounded_pairs:
        stats = statistics[names[0]]
        rounds = context.is_static or context.activation_bits is not None
        kinds = ("norm", "values", "up") if rounds else ("norm",)
        if pair.kind not in kinds or stats.num_tokens == 0:
            continue
        current = {**state, **changed}
        weights = [current[f"{name}.weight"].float() for name in names]
        absmax_K = shared_by_heads(stats.absmax_K, pair, context)
        if alpha is None:
            chosen_K = search(weights, absmax_K, stats, pair, context)
        else:
            chosen_K = factors(weights, absmax_K, pair, context, alpha)
        if chosen_K is not None:
            changed |= move_scale(current, statistics, pair, chosen_K, context)
    return changed


def search(
    weights: list[torch.Tensor],
    absmax_K: torch.Tensor,
    stats: InputStatistics,
    pair: ScalePair,
    context: LayerContext,
) -> torch.Tensor | None:
    """Return the best factors [K] of a pair, or None if factors do not help."""
    sample_TK = stats.sample()

    def least(tried: list[torch.Tensor], inputs_TK: torch.Tensor) -> torch.Tensor:
        return min(tried, key=lambda s_K: product_error(weights, s_K, inputs_TK, context))

    none_K = torch.ones_like(absmax_K)
    by_alpha = [factors(weights, absmax_K, pair, context, a) for a in ALPHAS]
    best_K = least([none_K, *by_alpha], sample_TK)
    tried = [none_K, best_K]
    if context.activation_bits is not None and not context.is_static:
        tried.append(fit_factors(weights, best_K, sample_TK, pair, context))
    held_TK = stats.held_out_sample()
    found_K = least(tried, sample_TK)
    if held_TK is not None and found_K is not none_K:
        found_K = least(tried, held_TK)
        if found_K is none_K:
            stats.notes.append(LEFT_OUT)
    return None if found_K is none_K else found_K


def factors(
    weights: list[torch.Tensor],
    absmax_K: torch.Tensor,
    pair: ScalePair,
    context: LayerContext,
    alpha: float,
) -> torch.Tensor:
    """Return the paper's factors s [K], normalized to sqrt(max * min) = 1."""
    weight_K = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    weight_K = shared_by_heads(weight_K, pair, context)
    scale_K = absmax_K.clamp(min=1e-5) ** alpha / weight_K.clamp(min=1e-5) ** (1 - alpha)
    return normalized(scale_K.clamp(min=float(scale_K.max()) / MAX_FACTOR))


def product_error(
    weights: list[torch.Tensor],
    scale_K: torch.Tensor,
    sample_TK: torch.Tensor,
    context: LayerContext,
) -> float:
    """Return the squared error of x W^T on the sample if both are rounded under the factors.

    With a scale per token, tokens are weighted by `token_weights`. The error is infinite if the
    scaled weights exceed the range of scales.
    """
    wanted_TN = sample_TK @ torch.cat(weights).t()
    token_T = torch.ones_like(wanted_TN[:, 0])
    x_TK = sample_TK / scale_K
    if context.is_static:
        weight_K = sum((weight * scale_K).square().sum(0) for weight in weights)
        full = float(x_TK.abs().max()) / LARGEST["int"]
        tried = (full * fraction for fraction in FRACTIONS[::3])
        best = min(tried, key=lambda scale: rounding_error(x_TK, scale, weight_K))
        x_TK = round_static(x_TK, best)
    elif context.activation_bits is not None:
        x_TK = fake_quantize_tokens(x_TK, context.activation_bits)
        token_T = token_weights(wanted_TN.square().sum(1))
    try:
        rounded_NK = torch.cat([_round(weight_NK * scale_K, context.spec) for weight_NK in weights])
    except RangeError:
        return math.inf
    error_T = (wanted_TN - x_TK @ rounded_NK.t()).square().sum(1)
    return float((error_T * token_T).double().sum())


def _round(weight_NK: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    scales_NG, zeros_NG = affine.choose_scales(weight_NK, spec, method=SEARCH_METHOD)
    codes_NK = affine.quantize(weight_NK, scales_NG, zeros_NG, spec)
    return affine.dequantize(codes_NK, scales_NG, zeros_NG)


SMOOTHQUANT = Transform(name="smoothquant", on_statistics=smooth_layer)
