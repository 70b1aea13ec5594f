"""Requirements on every W4A16 variant for few rows, against float64, on an sm_90 GPU."""

import pytest
import torch

from formats.numerics.bits import pack
from qkernels import ops
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_small_m_config import SMALL_M_ROWS, SmallMConfig
from tests.qkernels.gpu.products import check_product, random_x
from tests.qkernels.plans import multiply

w4a16 = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

pytestmark = pytest.mark.hopper

# the tile, and as many rows as leave one without an input
BODIES = {"limbs": (GemvImmaConfig(), 3)}
BODIES |= {f"small M {n}": (SmallMConfig(block_m=n, stages=3), n - 1) for n in SMALL_M_ROWS}


@pytest.fixture(params=BODIES)
def body(request):
    return BODIES[request.param]


@pytest.fixture
def check(body, assert_close, tolerance):
    """One product, whole and by element, twice."""

    def run(packed, x, bias=None):
        check_product(packed, x, bias, body[0], assert_close, tolerance)

    return run


@pytest.fixture
def product(body, half):
    """A weight to x -> its product."""

    def make(packed):
        weight = ops.prepare_weight(packed, half, kernel="w4a16")
        return lambda x: multiply(x, weight, tile=body[0])

    return make


@pytest.mark.parametrize("K", [128, 256, 1024, 2176])
@pytest.mark.parametrize("N", [8, 24, 72, 136, 1000])
def test_padded_outputs_are_not_written(check, body, make_weight, half, poison, N, K):
    bias = torch.randn(N, device="cuda").to(half)
    check(make_weight(N, K, 128, symmetric=False), random_x(body[1], K, half), bias)


@pytest.mark.parametrize("fewer", [0, 2])
def test_inputs_of_very_different_sizes(check, body, make_weight, half, poison, fewer):
    """Also within one group: one bit less would show in the sums of the small inputs."""
    x = random_x(body[1] - fewer, 512, half, spread=12) * 2.0**-8  # sums stay within float16
    check(make_weight(136, 512, 128, spread=8), x)


def test_large_input_with_zero_code_keeps_small_inputs(product, body, make_weight, half):
    """Codes of 8 are zero: the sum is of inputs 2^-12 as large as the group's largest."""
    packed = make_weight(64, 256, 128)
    codes = packed.codes()
    codes[:, [5, 200]] = 8
    packed.words_NW.copy_(pack(codes, 4))
    x = random_x(body[1], 256, half) / 4
    x[:, [5, 200]] = 2.0**12
    got = product(packed)(x).double()
    want = x.double() @ packed.dequantize(torch.float64).t()
    assert (got - want).norm() < 2 * torch.finfo(half).eps * want.norm()


@pytest.mark.parametrize("power", [None, -60, -6, 14, 100])
def test_inputs_of_any_magnitude(check, body, make_weight, half, poison, power):
    """Within what outputs in the dtype can hold; a row of zeros among them."""
    if half == torch.float16 and power in (-60, 100):
        pytest.skip("float16 has no such numbers")
    x = random_x(body[1], 256, half)
    x = (x / x.abs().amax() * (0 if power is None else 2.0**power)).to(half)
    x[1] = 0
    check(make_weight(72, 256, 128), x)


def test_strides_and_an_odd_address(product, body, make_weight, half):
    run, rows = product(make_weight(136, 128, 128)), body[1]
    x = random_x(1, 2 * rows * 128 + 1, half)[0, 1:].view(rows, 256)
    assert torch.equal(run(x[:, ::2]), run(x[:, ::2].clone()))
