"""act_quant.encode divides by a product with the rounded inverse; here is why that is exact."""

import pytest
import torch

from formats.activation import MIN_INPUT_SCALE


def corrected_once(x, scale):
    """act_quant.encode's arithmetic; float64 holds each fused multiply-add exactly enough."""
    inverse = 1 / scale
    quotient = x * inverse
    remainder = (x.double() - quotient.double() * scale.double()).float()
    return (quotient.double() + remainder.double() * inverse.double()).float()


@pytest.mark.parametrize("mantissa_bits", [7, 10])  # bfloat16, float16
@pytest.mark.parametrize("largest", [127.0, 448.0])
def test_one_correction_is_exact(mantissa_bits, largest):
    """Every mantissa over the scale of every mantissa; exponents change nothing."""
    count = 2**mantissa_bits
    mantissas = 1 + torch.arange(count) / count
    scales = (mantissas / largest)[:, None]
    assert torch.equal(corrected_once(mantissas, scales), mantissas / scales)
    assert not torch.equal(mantissas * (1 / scales), mantissas / scales), "without it, it is not"


@pytest.mark.parametrize("largest", [127.0, 448.0])
def test_codes_over_the_smallest_scale_are_exact(largest):
    mantissas = 1 + torch.arange(128) / 128
    x = (mantissas.double() * 2.0 ** torch.arange(-140, -20)[:, None]).float().flatten()
    x = x[x <= largest * MIN_INPUT_SCALE]
    scale = torch.tensor(MIN_INPUT_SCALE)
    got, want = corrected_once(x, scale), x / scale
    assert torch.equal(got.round(), want.round())
    assert torch.equal(
        got.to(torch.float8_e4m3fn).view(torch.uint8),
        want.to(torch.float8_e4m3fn).view(torch.uint8),
    )
