"""Limbs in plain torch: they represent the inputs, in the layout of limbs.py."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs, inputs_of_words, to_limbs

FORMS = [(M, LimbForm(bits=bits)) for M in (1, 2, 3, 4) for bits in (4, 8)]


def random_inputs(M, K, dtype=torch.float16, spread=0):
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    x = (x * 2 ** (spread * torch.rand(M, K, generator=generator))).to(dtype)
    x[0, 5] = 0
    return x


@pytest.mark.parametrize("M, form", FORMS)
@pytest.mark.parametrize("half_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [0, 12])
def test_limbs_sum_to_inputs(M, form, half_dtype, spread):
    x = random_inputs(M, 384, half_dtype, spread)
    got = from_limbs(to_limbs(x, form)).view(M, -1, 128)
    want = x.double().view(M, -1, 128)
    largest = want.abs().amax(2, keepdim=True)
    assert ((got - want).abs() <= 2**-29 * largest).all()
    exact = want.abs() >= 2**-12 * largest
    assert torch.equal(got[exact], want[exact]), "11 bits at most: nothing is lost there"


def test_limb_word_equals_handmade():
    """Input 0 is 1, so 2^29 in steps of 2^-29: limb 3 is 32. Input 17 is byte 3 of its word."""
    x = torch.zeros(2, 128, dtype=torch.float16)
    x[1, 0], x[1, 17], x[1, 9] = 1, -1, 0.5
    limbs = to_limbs(x, LimbForm(bits=4, with_sums=True))
    words = limbs.words[0, 0]  # [i, column, t, w]
    assert words[0, 7, 0, 0] == 0x20 + (-32 << 24)
    assert words[0, 7, 0, 1] == 16 << 16, "9 = 8 (w % 2) + 1: byte 2 of word w = 1"
    assert words.count_nonzero() == 2
    assert limbs.scales[0, 0].tolist()[4:] == [2.0**-29 * 256**d for d in range(4)]
    assert limbs.sums[0, 0].tolist() == [0] * 7 + [16]


@pytest.mark.parametrize("bits", [4, 8])
def test_every_input_is_in_exactly_one_word(bits):
    assert inputs_of_words(bits).flatten().sort().values.tolist() == list(range(128))


@pytest.mark.parametrize("M, form", FORMS)
def test_zeros_nan_and_inf(M, form):
    x = torch.zeros(M, 256, dtype=torch.bfloat16)
    x[-1, 200] = float("inf")
    got = from_limbs(to_limbs(x, form))
    assert got[-1, 128:].isnan().all()
    assert not got[-1, :128].any() and not got[:-1].any()


@pytest.mark.parametrize(
    "shape, form, found",
    [
        ((1, 100), LimbForm(bits=4), "inputs divisible by 128"),
        ((0, 128), LimbForm(bits=4), "1 to 4 rows"),
        ((5, 128), LimbForm(bits=4), "1 to 4 rows"),
    ],
)
def test_inputs_that_limbs_cannot_represent_are_refused(shape, form, found):
    with pytest.raises(KernelError, match=found):
        ops.to_limbs(torch.empty(shape, dtype=torch.float16), form)


def test_float32_and_odd_shapes_are_refused():
    form = LimbForm(bits=4)
    with pytest.raises(KernelError, match="float16 or bfloat16"):
        ops.to_limbs(torch.zeros(1, 128), form)
    with pytest.raises(KernelError, match="an even last dim"):
        ops.activate(torch.zeros(1, 255, dtype=torch.float16), ops.ActSpec(kind="silu"), form)
    with pytest.raises(KernelError, match="expected 2 dims"):
        ops.to_limbs(torch.zeros(128, dtype=torch.float16), form)


@pytest.mark.parametrize("symmetric", [True, False])
def test_limb_product_equals_input_product(make_weight, symmetric):
    x = random_inputs(3, 256)
    packed = make_weight(40, 256, 128, symmetric)
    weight = ops.prepare_weight(packed, torch.float16, "cpu", kernel="reference")
    assert ops.plan_linear(weight, 3).input is None, "it is no faster there"
    limbs = ops.to_limbs(x, LimbForm(bits=4, with_sums=not symmetric))
    got = ops.linear(limbs, weight)
    assert torch.equal(got, ops.linear(x, weight))
    with pytest.raises(KernelError, match="expected limbs of 256 inputs"):
        ops.linear(ops.to_limbs(x[:, :128], limbs.form), weight)
    reordered = replace(weight, input_order=torch.arange(256))
    with pytest.raises(KernelError, match="the weight sorts its inputs"):
        ops.linear(limbs, reordered)
    with pytest.raises(KernelError, match="linear bias"):
        ops.linear(limbs, weight, torch.zeros(41, dtype=torch.float16))
