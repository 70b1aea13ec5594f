"""SmoothQuant: move the outliers of activations into the weights, before both are rounded.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (2022). The factors are s_j = max|X_j|^alpha / max|W_j|^(1-alpha), for inputs that come from
a norm. alpha is given for the whole model, or searched for each input to minimize the error of the
rounded product on a sample of tokens. Searched factors are dropped if they enlarge this error on
held-out windows.
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
    """Move the factors of every scale pair whose `previous` is a norm.

    With static activations all scale pairs are smoothed. `alpha` None: search it for each input.
    """
    changed: LayerState = {}
    for pair in context.scale_pairs:
        stats = statistics[pair.linears[0]]
        # With one scale for all tokens, every channel with large values hurts. Inputs that do not
        # come from a norm are therefore smoothed, too.
        kinds = ("norm", "values", "up") if context.is_static else ("norm",)
        if pair.kind not in kinds or stats.num_tokens == 0:
            continue
        current = {**state, **changed}
        weights = [current[f"{name}.weight"].float() for name in pair.linears]
        absmax_K = shared_by_heads(stats.absmax_K, pair, context)
        tried = {
            a: factors(weights, absmax_K, pair, context, a) for a in ([alpha] if alpha else ALPHAS)
        }
        if alpha is None:
            sample_TK = stats.sample()
            tried = {-1.0: torch.ones_like(stats.absmax_K), **tried}
            errors = {
                a: product_error(weights, scale_K, sample_TK, context)
                for a, scale_K in tried.items()
            }
            best = min(errors, key=errors.get)
            if best >= 0 and not helps_held_out(weights, tried[best], stats, context):
                stats.notes.append(LEFT_OUT)
                best = -1.0
        else:
            best = alpha
        if best >= 0:
            changed |= move_scale({**state, **changed}, statistics, pair, tried[best], context)
    return changed


def helps_held_out(
    weights: list[torch.Tensor],
    scale_K: torch.Tensor,
    stats: InputStatistics,
    context: LayerContext,
) -> bool:
    """Return True unless the factors enlarge the rounded product's error on held-out windows."""
    held_TK = stats.held_out_sample()
    if held_TK is None:
        return True
    scaled, plain = (
        product_error(weights, each_K, held_TK, context)
        for each_K in (scale_K, torch.ones_like(scale_K))
    )
    return scaled <= plain


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
    scale_K = scale_K.clamp(min=float(scale_K.max()) / MAX_FACTOR)
    return scale_K / (scale_K.max() * scale_K.min()).sqrt()


def product_error(
    weights: list[torch.Tensor],
    scale_K: torch.Tensor,
    sample_TK: torch.Tensor,
    context: LayerContext,
) -> float:
    """Return the squared error of x W^T on the sample if both are rounded under the factors.

    The error is infinite if the scaled weights exceed the range of scales.
    """
    x_TK = sample_TK / scale_K
    if context.is_static:
        weight_K = sum((weight * scale_K).square().sum(0) for weight in weights)
        full = float(x_TK.abs().max()) / LARGEST["int"]
        tried = (full * fraction for fraction in FRACTIONS[::3])
        best = min(tried, key=lambda scale: rounding_error(x_TK, scale, weight_K))
        x_TK = round_static(x_TK, best)
    elif context.activation_bits is not None:
        x_TK = fake_quantize_tokens(x_TK, context.activation_bits)
    error = 0.0
    for weight_NK in weights:
        try:
            rounded_NK = _round(weight_NK * scale_K, context.spec)
        except RangeError:
            return math.inf
        difference = sample_TK @ weight_NK.t() - x_TK @ rounded_NK.t()
        error += float(difference.double().square().sum())
    return error


def _round(weight_NK: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    scales_NG, zeros_NG = affine.choose_scales(weight_NK, spec, method=SEARCH_METHOD)
    codes_NK = affine.quantize(weight_NK, scales_NG, zeros_NG, spec)
    return affine.dequantize(codes_NK, scales_NG, zeros_NG)


SMOOTHQUANT = Transform(name="smoothquant", on_statistics=smooth_layer)
