"""Smoothing factors that are fitted to data."""

import pytest
import torch

from calibrate.calibration.activations import fake_quantize_tokens
from calibrate.calibration.input_range import round_static
from calibrate.layer_map import ScalePair
from calibrate.solvers.solving import LayerContext
from calibrate.transforms.fitting import expected_error, fit_factors, normalized
from calibrate.transforms.smoothquant import ALPHAS, factors, product_error
from formats.scheme import Scheme

PAIR = ScalePair(previous="norm", linears=("q", "k"), kind="norm")
WIDTH = 96


def context() -> LayerContext:
    parsed = Scheme.parse("w8a8")
    return LayerContext(
        layer_map=None,
        config={},
        spec=parsed.weight,
        activation=parsed.activation,
        activation_bits=8,
    )


def tokens(seed: int) -> torch.Tensor:
    """Return tokens with a few channels of outliers and others of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(256, WIDTH, generator=generator)
    size_K = torch.logspace(-1, 0.5, WIDTH)
    size_K[::24] *= 12
    return x_TK * size_K


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    column_K = torch.rand(WIDTH, generator=generator) + 0.2
    return [torch.randn(rows, WIDTH, generator=generator) * column_K for rows in (64, 32)]


def test_fitted_factors_beat_every_alpha_on_unseen_tokens():
    own, sample_TK, unseen_TK = weights(), tokens(0), tokens(1)
    absmax_K = sample_TK.abs().amax(0)
    by_alpha = [factors(own, absmax_K, PAIR, context(), alpha) for alpha in ALPHAS]
    start_K = min(by_alpha, key=lambda s_K: product_error(own, s_K, sample_TK, context()))
    fitted_K = fit_factors(own, start_K, sample_TK, PAIR, context())
    assert torch.isfinite(fitted_K).all() and (fitted_K > 0).all()
    torch.testing.assert_close(fitted_K, normalized(fitted_K))
    least = min(product_error(own, s_K, unseen_TK, context()) for s_K in by_alpha)
    assert product_error(own, fitted_K, unseen_TK, context()) < 0.95 * least


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
def test_expected_error_equals_measured_rounding_error(spread):
    """Values from far below the step to many steps."""
    x_TK = spread * torch.randn(512, 64, generator=torch.Generator().manual_seed(3))
    found = expected_error(x_TK.abs(), torch.tensor(0.25)).sum()
    expected = (round_static(x_TK, 0.25) - x_TK).square().sum()
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0)


def test_expected_error_with_a_scale_per_token():
    x_TK = tokens(4)
    step_T1 = x_TK.abs().amax(1, keepdim=True) / 127
    found = expected_error(x_TK.abs(), step_T1).sum()
    expected = (fake_quantize_tokens(x_TK) - x_TK).square().sum()
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0)


def test_fitted_factors_are_finite_for_zero_channels():
    sample_TK = tokens(5)
    sample_TK[:, :8] = 0
    start_K = torch.ones(WIDTH)
    fitted_K = fit_factors(weights(), start_K, sample_TK, PAIR, context())
    assert torch.isfinite(fitted_K).all() and (fitted_K > 0).all()
