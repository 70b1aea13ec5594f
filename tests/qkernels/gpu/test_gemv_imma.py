"""W4A16 and W8A16 of few rows as 8-bit limbs against float64, on an sm_90 GPU."""

import pytest
import torch

from qkernels import ops
from qkernels.operands.limbs import LIMBS_MAX_ROWS
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig, default_gemv_config
from tests.qkernels.gpu.products import check_product, check_two_in_a_graph, random_x
from tests.qkernels.plans import multiply

w4a16 = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

pytestmark = pytest.mark.hopper

TILE = GemvImmaConfig()


@pytest.fixture
def check(assert_close, tolerance):
    """One product, whole and by element, twice."""

    def run(packed, x, bias=None, tile=TILE):
        check_product(packed, x, bias, tile, assert_close, tolerance)

    return run


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [128, 256, 384, -1])
@pytest.mark.parametrize("M", range(1, LIMBS_MAX_ROWS + 1))
@pytest.mark.parametrize("bits", [4, 8])
def test_every_group_length(check, make_weight, half, poison, bits, M, group, symmetric):
    check(make_weight(200, 768, group, symmetric, spread=8, bits=bits), random_x(M, 768, half))


@pytest.mark.parametrize("warps", [1, 4, 8, 16])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile(check, make_weight, half, poison, bits, warps, steps_in_flight, block_n):
    """9 steps: fewer than some blocks request together, and no multiple of any number of them."""
    tile = GemvImmaConfig(warps=warps, steps_in_flight=steps_in_flight, block_n=block_n)
    packed = make_weight(136, 1152, 128, symmetric=False, bits=bits)
    check(packed, random_x(3, 1152, half), tile=tile)


def test_extreme_codes_and_inputs(check, make_weight, half, poison):
    """The largest possible sum of a step: every code and every limb at its extreme."""
    for bits in (4, 8):
        for symmetric in (True, False):
            packed = make_weight(64, 256, 128, symmetric, bits=bits)
            packed.words_NW[:32], packed.words_NW[32:] = 0, -1
            if not symmetric:
                packed.zeros_NG[::2], packed.zeros_NG[1::2] = 0, 2**bits - 1
            x = torch.full((3, 256), 255 / 256, device="cuda", dtype=half)
            x[1], x[2, ::2] = -x[1], -x[2, ::2]
            check(packed, x)


def test_rows_with_nan_or_inf_become_nan(make_weight, half):
    packed = make_weight(72, 256, 128, symmetric=False)
    weight = ops.prepare_weight(packed, half, kernel=f"w{packed.spec.bits}a16")
    x = random_x(4, 256, half)
    want = multiply(x, weight, tile=TILE)
    x[1, 3], x[2, 255] = float("nan"), float("-inf")
    got = multiply(x, weight, tile=TILE)
    assert got[1:3].isnan().all()
    assert torch.equal(got[[0, 3]], want[[0, 3]]), "rows do not touch each other"


def test_chosen_config_in_captured_graph(make_weight, half):
    """A graph of products that share limbs' memory, replayed with new inputs."""
    N, K = 1024, 4096
    assert default_gemv_config(2, N, K, 128, 4, 132) is not None
    packed = [make_weight(N, K, 128), make_weight(K, N, 128, symmetric=False)]
    check_two_in_a_graph(packed, random_x(2, K, half))
