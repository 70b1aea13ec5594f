"""The Hopper body of W4A16 against float64, on a GPU of that generation."""

import pytest
import torch

from qkernels import ops
from qkernels.launch import lacks_gluon
from qkernels.tiles import (
    LINEAR_HOPPER_BLOCK_M,
    LINEAR_HOPPER_BLOCK_N,
    LinearHopperTile,
    ceil_div,
    linear_hopper_tile,
)

w4a16 = pytest.importorskip("qkernels.w4a16", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or lacks_gluon(torch.device("cuda", 0)) is not None,
        reason="needs an sm_90 GPU and a triton with gluon",
    ),
]


@pytest.fixture
def check(assert_close, tolerance):
    """One product in `blocks` blocks, whole and by element, twice."""

    def run(packed, x, bias=None, blocks=132):
        M, N = x.shape[0], packed.out_features
        tiles = ceil_div(N, LINEAR_HOPPER_BLOCK_N) * ceil_div(M, LINEAR_HOPPER_BLOCK_M)
        tile = LinearHopperTile(blocks=min(blocks, tiles))
        weight = ops.prepare_weight(packed, x.dtype, kernel="triton_w4a16")
        got = w4a16.linear(x, weight, bias, tile=tile)
        assert got.dtype == x.dtype
        x, added = x.double(), 0 if bias is None else bias.double()
        exact = x @ packed.dequantize(torch.float64).t() + added
        assert_close("hopper", exact, got, min(4e-3, tolerance(got.dtype)))
        # the weight is rounded once; beyond that there are only the sum and its rounding
        weight_NK = packed.dequantize(got.dtype).double()
        want = x @ weight_NK.t() + added
        bound = torch.finfo(got.dtype).eps * want.abs() + 2**-14 * (x.abs() @ weight_NK.abs().t())
        assert ((got.double() - want).abs() <= bound).all(), "an element is off"
        again = w4a16.linear(x.to(got.dtype), weight, bias, tile=tile)
        assert torch.equal(got, again), "equal inputs, equal bits"

    return run


def random_x(M, K, dtype):
    generator = torch.Generator("cuda").manual_seed(M)
    return torch.randn(M, K, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [128, 256, 384, -1])
def test_every_group_length(check, make_weight, half, poison, group, symmetric):
    check(make_weight(200, 768, group, symmetric, spread=8), random_x(140, 768, half))


@pytest.mark.parametrize("M", [1, 3, 17, 63, 118, 257, 520])
def test_rows_beyond_the_tile_are_not_written(check, make_weight, half, poison, M):
    check(make_weight(136, 256, 128), random_x(M, 256, half))


@pytest.mark.parametrize("N", [8, 24, 72, 136, 1000])
def test_padded_outputs_are_not_written(check, make_weight, half, poison, N):
    bias = torch.randn(N, device="cuda").to(half)
    check(make_weight(N, 256, 128, symmetric=False), random_x(130, 256, half), bias)


@pytest.mark.parametrize("blocks", [1, 2, 5, 11])
@pytest.mark.parametrize("K", [128, 384, 1152])
def test_a_block_goes_on_with_the_next_tile(check, make_weight, half, poison, K, blocks):
    """12 tiles; 128 inputs are fewer slices than x is loaded ahead."""
    check(make_weight(504, K, 128, spread=8), random_x(600, K, half), blocks=blocks)


def test_the_weights_have_the_bits_of_packed(make_weight, half):
    """One-hot rows read the matrix back: exact, since each sum has one term."""
    packed = make_weight(200, 256, 128, symmetric=False, spread=8)
    weight = ops.prepare_weight(packed, half, kernel="triton_w4a16")
    one_hot = torch.eye(256, dtype=half, device="cuda")
    got = w4a16.linear(one_hot, weight, tile=LinearHopperTile(blocks=2))
    assert torch.equal(got.t(), packed.dequantize(half))


def test_x_at_an_odd_address_and_with_strides(make_weight, half):
    weight = ops.prepare_weight(make_weight(136, 128, 128), half, kernel="triton_w4a16")
    x = random_x(1, 2 * 140 * 128 + 1, half)[0, 1:].view(140, 256)
    dense, tile = x[:, ::2].clone(), LinearHopperTile(blocks=2)
    assert x.data_ptr() % 16 and dense.data_ptr() % 16 == 0
    want = w4a16.linear(dense, weight, tile=tile)
    assert torch.equal(w4a16.linear(x[:, ::2], weight, tile=tile), want)
    odd = random_x(1, 140 * 128 + 1, half)[0, 1:].view(140, 128)
    assert torch.equal(
        w4a16.linear(odd, weight, tile=tile), w4a16.linear(odd.clone(), weight, tile=tile)
    )


def test_chosen_and_captured(make_weight, half):
    """The choice of tiles.py takes the body at this shape; a graph replays it with new inputs."""
    N, K, M = 4096, 4096, 1024
    assert linear_hopper_tile(M, N, K, 128, 132) is not None
    packed = make_weight(N, K, 128)
    weight = ops.prepare_weight(packed, half)
    x = random_x(M, K, half)
    ops.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, weight)
    weight_NK = packed.dequantize(torch.float64)
    for _ in range(3):
        x.normal_()
        graph.replay()
        want = x.double() @ weight_NK.t()
        assert float((y.double() - want).norm() / want.norm()) < 4e-3
