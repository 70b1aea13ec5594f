"""act_quant.encode divides by a product with the rounded inverse; here is why that is exact."""

import pytest
import torch

from formats.numerics.activation import MIN_INPUT_SCALE


def corrected_once(x, scale):
    """act_quant.encode's arithmetic; float64 holds each fused multiply-add exactly enough."""
    inverse = 1 / scale
    quotient = x * inverse
    remainder = (x.double() - quotient.double() * scale.double()).float()
    return (quotient.double() + remainder.double() * inverse.double()).float()


@pytest.mark.parametrize("mantissa_bits", [7, 10])  # bfloat16, float16
@pytest.mark.parametrize("largest", [127.0, 448.0])
def test_inverse_rounding_with_one_correction_is_exact(mantissa_bits, largest):
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


def inverse_for_codes(scale, largest=127.0):
    """act_quant._inverse_for_codes; float64 holds each fused multiply-add exactly enough."""
    inverse = 1 / scale
    half = (scale * largest).bfloat16().float() / 2
    quotient = corrected_once(half, scale)
    rest = half.double() * inverse.double() - largest / 2
    too_low = (quotient >= largest / 2) & (rest < 0)
    too_high = (quotient < largest / 2) & (rest >= 0)
    return (inverse.view(torch.int32) + too_low.int() - too_high.int()).view(torch.float32)


def one_product(x, inverse):
    """The product with an inverse, rounded once, to an integer."""
    return (x.double() * inverse.double()).round()


MANTISSAS = 1 + torch.arange(128) / 128  # of bfloat16


def test_codes_from_one_product_are_exact():
    """Every mantissa, down to the smallest codes, below the largest of its row, of every mantissa.

    A product of 8 and 24 bits is exact in float64.
    """
    x = (MANTISSAS * 2.0 ** torch.arange(-12, 1)[:, None]).flatten()
    largest = MANTISSAS[:, None]
    scales = largest / 127
    below = x <= largest
    want = (x / scales).round()
    got = one_product(x, inverse_for_codes(scales))
    assert torch.equal(got[below], want[below])
    # no inverse that is chosen in one way for all rows does
    for step in (-1, 0, 1):
        inverse = ((1 / scales).view(torch.int32) + step).view(torch.float32)
        assert not torch.equal(one_product(x, inverse)[below], want[below])


def test_codes_from_one_product_are_exact_at_smallest_scale():
    x = (MANTISSAS.double() * 2.0 ** torch.arange(-140, -20)[:, None]).float().flatten()
    scale = torch.tensor([MIN_INPUT_SCALE])
    x = x[x <= 127 * scale]
    assert torch.equal(one_product(x, inverse_for_codes(scale)), (x / scale).round())
