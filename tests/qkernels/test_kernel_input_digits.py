"""Digits made by a kernel, alone or fused, are those of the plain torch twin."""

import pytest
import torch

from qkernels import ops
from qkernels.operands.limbs import DigitForm
from qkernels.operands.limbs_reference import input_digits, inputs_of
from tests.qkernels.digit_bits import written

FORMS = [(M, DigitForm(bits=bits, with_sums=M > 1)) for M in (1, 2, 3, 4) for bits in (4, 8)]
IDS = [f"{M} rows, {form.bits} bits" for M, form in FORMS]
forms = pytest.mark.parametrize("M, form", FORMS, ids=IDS)


def random_inputs(M, K, dtype, spread=0):
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    return (x * 2 ** (spread * torch.rand(M, K, generator=generator))).to(dtype)


def poison(device):
    from qkernels.gpu.workspace import workspace

    workspace(device)[0].fill_(float("nan"))


def check_equal(digits, make_reference):
    got = written(digits)
    poison(digits.words.device)
    for have, want in zip(got, written(make_reference()), strict=True):
        assert torch.equal(have, want)


def check_near(values, want):
    """Few are apart, by a rounding or two."""
    apart = (values.double() - want.double()).abs()
    assert (apart <= 2 * torch.finfo(want.dtype).eps * want.double().abs()).all()
    assert (apart > 0).double().mean() < 0.02


@forms
@pytest.mark.parametrize("spread", [0, 12])
def test_digits(half, device, M, form, spread):
    x = random_inputs(M, 384, half, spread).to(device)
    x[0, 5], x[-1, :128] = 0, 0
    poison(device)
    digits = ops.input_digits(x, form, kernel="triton")
    check_equal(digits, lambda: input_digits(x, form))


@forms
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_what_is_no_number(half, device, M, form):
    x = random_inputs(M, 256, half)
    x[-1, 200] = float("inf")
    x[0, 3] = float("nan")
    values = inputs_of(ops.input_digits(x.to(device), form, kernel="triton")).cpu()
    assert values[0, :128].isnan().all() and values[-1, 128:].isnan().all()
    other = values.clone()
    other[0, :128], other[-1, 128:] = 0, 0
    want = x.double()
    want[0, :128], want[-1, 128:] = 0, 0
    assert (other - want).norm() <= 1e-7 * want.norm()


@pytest.mark.parametrize("M, form", FORMS[:2] + FORMS[-3:-1], ids=IDS[:2] + IDS[-3:-1])
def test_rows_with_strides_and_at_an_odd_address(half, device, M, form):
    x = random_inputs(M, 257, half).to(device)
    for given in (x[:, 1:], x.flatten()[1 : 1 + M * 256].view(M, 256)):
        check_equal(
            ops.input_digits(given, form, kernel="triton"),
            lambda given=given: input_digits(given.contiguous(), form),
        )


@forms
@pytest.mark.parametrize("C, add", [(128, True), (1152, False), (1152, True)])
def test_norm(half, device, M, form, C, add):
    """A sum in another order may move a value by its last bit; the digits are of such values.

    9 steps: a block has 8.
    """
    # so small that eps counts
    x, residual = (
        (random_inputs(M, C + i, half)[:, :C] / 256).contiguous().to(device) for i in (0, 1)
    )
    weight = random_inputs(1, C, half)[0].to(device)
    poison(device)
    if add:
        digits, total = ops.add_rms_norm_digits(x, residual, weight, 1e-5, form, "triton")
        want, want_total = ops.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, want_total)
    else:
        digits = ops.rms_norm_digits(x, weight, 1e-5, form, "triton")
        want = ops.rms_norm(x, weight, 1e-5)
    values = inputs_of(digits).to(half)
    check_near(values, want)
    check_equal(digits, lambda: input_digits(values, form))


@pytest.mark.parametrize("add", [False, True])
def test_norm_of_a_row_that_registers_do_not_hold(half, device, add, monkeypatch):
    from qkernels.rowwise import norm_act_limbs as fused_digits

    monkeypatch.setattr(fused_digits, "MOST_CHANNELS", 128)
    test_norm(half, device, 3, DigitForm(bits=4), 256, add)


@forms
def test_silu_and_mul(half, device, M, form):
    width = 640
    x = random_inputs(M, 2 * width, half).to(device)
    want = ops.silu_and_mul(x)
    poison(device)
    digits = ops.silu_and_mul_digits(x, form, kernel="triton")
    values = inputs_of(digits).to(half)
    check_near(values, want)
    check_equal(digits, lambda: input_digits(values, form))
