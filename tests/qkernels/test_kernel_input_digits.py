"""Digits put together again give the inputs, and their sums the sums."""

import pytest
import torch

from qkernels.input_digits import digit_rows_of, digits_of


def columns_of(digits, bits):
    """Digits as integers [K/128, T, 8 columns, 128 inputs in order]."""
    steps, T = digits.words.shape[:2]
    # [.., i, column, t / 2, t % 2, w / 2, w % 2, e, 1 of {0, 16} or {0, 8}]
    data = digits.words.cpu().view(torch.int8).view(steps, T, 2, 8, 2, 2, 2, 2, 2, 2)
    order = {4: (2, 6, 9, 7, 4, 5, 8), 8: (5, 6, 7, 9, 2, 4, 8)}[bits]
    return data.permute(0, 1, 3, *order).reshape(steps, T, 8, 128)


@pytest.mark.parametrize("M, K", [(1, 128), (2, 384), (3, 256), (4, 128)])
@pytest.mark.parametrize("spread", [0, 12])
@pytest.mark.parametrize("bits", [4, 8])
def test_digits_are_the_inputs(half, device, M, K, spread, bits):
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    x = (x * 2 ** (spread * torch.rand(M, K, generator=generator))).to(half)
    x[0, 5] = 0
    digits = digits_of(x.to(device), bits, with_sums=True)
    columns = columns_of(digits, bits).double()
    steps, T = columns.shape[:2]
    scales = digits.scales.cpu().double().view(steps, T, 8)
    sums = digits.sums.cpu().view(steps, T, 8)
    for m in range(M):
        own = slice(4 * m % 8, 4 * m % 8 + 4)
        assert torch.equal(sums[:, m // 2, own], columns[:, m // 2, own].sum(-1).int())
        got = (columns[:, m // 2, own] * scales[:, m // 2, own, None]).sum(1)
        want = x[m].double().view(steps, 128)
        bound = 2**-29 * want.abs().amax(1, keepdim=True)
        assert ((got - want).abs() <= bound).all()
        exact = want.abs() >= 2**-12 * want.abs().amax(1, keepdim=True)
        assert torch.equal(got[exact], want[exact]), "11 bits at most: nothing is lost there"


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_zeros_and_what_is_no_number(half, device):
    x = torch.zeros(4, 256, dtype=half)
    x[1, 200], x[2, 3] = float("inf"), float("nan")
    digits = digits_of(x.to(device), 4, with_sums=False)
    assert digits.sums is None
    scales = digits.scales.cpu().view(2, 2, 2, 4)  # step, tile, row of it, digit
    nan = scales.isnan().all(-1).permute(1, 2, 0).reshape(4, 2)
    assert nan.tolist() == [[False, False], [False, True], [True, False], [False, False]]
    assert torch.equal(scales.isnan().any(-1), scales.isnan().all(-1))
    columns = columns_of(digits, 4)
    assert not columns[:, 0, :4].any() and not columns[:, 1, 4:].any()


@pytest.mark.parametrize("M, K, R", [(5, 128, 8), (8, 384, 8), (9, 256, 16), (16, 128, 16)])
@pytest.mark.parametrize("spread", [0, 12])
def test_rows_of_digits_are_the_inputs(half, device, M, K, R, spread):
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    x = (x * 2 ** (spread * torch.rand(M, K, generator=generator))).to(half)
    x[0, 5], x[2] = 0, 0
    x[3, 7] = float("inf")
    digits = digit_rows_of(x.to(device), R, with_sums=True)
    steps = K // 128
    # [step, digit, row, j, h, t, e, 1 of {0, 16}]: input 32 j + 16 (last) + 8 h + 2 t + e
    data = digits.words.cpu().view(torch.int8).view(steps, 4, R, 4, 2, 4, 2, 2)
    values = data.permute(0, 1, 2, 3, 7, 4, 5, 6).reshape(steps, 4, R, 128)[:, :, :M].double()
    facts = digits.facts.cpu()[:, :, :M]
    integers = (values * 256.0 ** torch.arange(4).view(4, 1, 1)).sum(1)
    got = (integers * facts[:, 0, :, None].double()).transpose(0, 1)
    want = x.double().view(M, steps, 128)
    finite = [m for m in range(M) if m != 3]
    assert ((got - want)[finite].abs() <= 2**-29 * want[finite].abs().amax(2, keepdim=True)).all()
    assert got[3, 0].isnan().all() and got[3, 1:].isfinite().all()
    sums = facts.view(torch.int32)
    pairs = values.sum(-1).int()
    assert torch.equal(sums[:, 1], pairs[:, 0] + 256 * pairs[:, 1])
    assert torch.equal(sums[:, 2], pairs[:, 2] + 256 * pairs[:, 3])
