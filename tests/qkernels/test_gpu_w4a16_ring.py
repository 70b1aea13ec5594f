"""W4A16 of up to 64 rows, through the ring, against float64, on an sm_90 GPU."""

import pytest
import torch

from formats.bits import pack
from qkernels import launch, ops
from qkernels.tiles import LINEAR_RING_ROWS, LinearRingTile, linear_ring_tile
from tests.qkernels.digit_products import check_product, random_x

w4a16 = pytest.importorskip("qkernels.w4a16", exc_type=ImportError)

pytestmark = pytest.mark.hopper

TILES = {rows: LinearRingTile(rows=rows, stages=3) for rows in LINEAR_RING_ROWS}


@pytest.fixture
def check(assert_close, tolerance):
    """One product, whole and by element, twice."""

    def run(packed, x, bias=None, tile=None):
        tile = tile or next(tile for rows, tile in TILES.items() if rows >= x.shape[0])
        check_product(packed, x, bias, tile, assert_close, tolerance)

    return run


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [128, 384, -1])
@pytest.mark.parametrize("M", [1, 5, 8, 9, 16, 17, 33, 64])
def test_every_group_length(check, make_weight, half, poison, M, group, symmetric):
    check(make_weight(200, 768, group, symmetric, spread=8), random_x(M, 768, half))


@pytest.mark.parametrize("split", [1, 2, 9])
@pytest.mark.parametrize("stages", [1, 3, 8])
@pytest.mark.parametrize("alone", [False, True], ids=["two blocks", "alone"])
@pytest.mark.parametrize("rows", LINEAR_RING_ROWS)
def test_every_tile(check, make_weight, half, poison, rows, alone, stages, split):
    """9 steps: parts of unequal length, and a ring that is not a multiple of any."""
    tile = LinearRingTile(rows=rows, stages=stages, split=split, alone=alone)
    packed = make_weight(328, 1152, 128, symmetric=False)
    check(packed, random_x(rows - 1, 1152, half), tile=tile)


@pytest.mark.parametrize("M", [8, 40])
def test_more_tiles_than_blocks(check, make_weight, half, M):
    """Blocks that go on to a next tile keep their place in the ring."""
    packed = make_weight(128 * 700 + 8, 384, 128)
    check(packed, random_x(M, 384, half))


@pytest.mark.parametrize("rows, split", [(8, 10), (32, 8), (64, 16)])
def test_many_times_the_same(make_weight, half, rows, split):
    """Who comes last changes nothing, and leaves no counter behind."""
    weight = ops.prepare_weight(make_weight(2048, 4096, 128), half, kernel="triton_w4a16")
    x = random_x(rows - 1, 4096, half)
    tile = LinearRingTile(rows=rows, split=split)
    want = w4a16.linear(x, weight, tile=tile)
    results = [w4a16.linear(x, weight, tile=tile) for _ in range(200)]
    assert all(torch.equal(each, want) for each in results)
    assert not launch.workspace(x.device)[1].any()


def test_parts_that_are_no_number_are_added(make_weight, half):
    weight = ops.prepare_weight(make_weight(136, 1024, 128), half, kernel="triton_w4a16")
    x = random_x(2, 1024, half)
    x.view(torch.int16)[1, 0] = -1
    x[1, 1000] = float("inf")
    got = w4a16.linear(x, weight, tile=LinearRingTile(rows=8, split=8))
    assert got[1].isnan().all() and got[0].isfinite().all()


@pytest.mark.parametrize("K", [128, 256, 1024, 2176])
@pytest.mark.parametrize("N", [8, 24, 72, 136, 1000])
def test_padded_outputs_are_not_written(check, make_weight, half, poison, N, K):
    bias = torch.randn(N, device="cuda").to(half)
    check(make_weight(N, K, 128, symmetric=False), random_x(6, K, half), bias)


def test_extreme_codes_and_inputs(check, make_weight, half, poison):
    """The largest sum of a step that there is: every code at its end."""
    for symmetric in (True, False):
        packed = make_weight(64, 256, 128, symmetric)
        packed.words_NW[:32], packed.words_NW[32:] = 0, -1
        if not symmetric:
            packed.zeros_NG[::2], packed.zeros_NG[1::2] = 0, 15
        x = torch.full((5, 256), 255 / 256, device="cuda", dtype=half)
        x[1], x[2, ::2] = -x[1], -x[2, ::2]
        check(packed, x)


@pytest.mark.parametrize("M", [7, 12, 30])
def test_inputs_of_very_different_sizes(check, make_weight, half, poison, M):
    """Of one group, too."""
    x = random_x(M, 512, half, spread=12) * 2.0**-8  # sums stay in the range of float16
    check(make_weight(136, 512, 128, spread=8), x)


def test_a_large_input_under_a_code_of_zero_hides_nothing(make_weight, half):
    """Codes of 8 are zero: the sum is of inputs 2^-12 as large as the group's largest."""
    packed = make_weight(64, 256, 128)
    codes = packed.codes()
    codes[:, [5, 200]] = 8
    packed.words_NW.copy_(pack(codes, 4))
    x = random_x(6, 256, half) / 4
    x[:, [5, 200]] = 2.0**12
    weight = ops.prepare_weight(packed, half, kernel="triton_w4a16")
    got = w4a16.linear(x, weight, tile=TILES[8]).double()
    want = x.double() @ packed.dequantize(torch.float64).t()
    assert (got - want).norm() < 2 * torch.finfo(half).eps * want.norm()


@pytest.mark.parametrize("power", [None, -60, -6, 14, 100])
def test_any_size(check, make_weight, half, poison, power):
    """Within what outputs in the dtype can hold; a row of zeros among them."""
    if half == torch.float16 and power in (-60, 100):
        pytest.skip("float16 has no such numbers")
    x = random_x(5, 256, half)
    x = (x / x.abs().amax() * (0 if power is None else 2.0**power)).to(half)
    x[1] = 0
    check(make_weight(72, 256, 128), x)


def test_rows_with_what_is_no_number_touch_no_others(make_weight, half):
    packed = make_weight(72, 256, 128, symmetric=False)
    weight = ops.prepare_weight(packed, half, kernel="triton_w4a16")
    x = random_x(6, 256, half)
    want = w4a16.linear(x, weight, tile=TILES[8])
    x[1, 3], x[2, 255] = float("nan"), float("-inf")
    got = w4a16.linear(x, weight, tile=TILES[8])
    assert got[1].isnan().all() and not got[2].isfinite().any()
    assert torch.equal(got[[0, 3, 4, 5]], want[[0, 3, 4, 5]])


def test_strides_and_an_odd_address(make_weight, half):
    weight = ops.prepare_weight(make_weight(136, 128, 128), half, kernel="triton_w4a16")
    x = random_x(1, 2 * 6 * 128 + 1, half)[0, 1:].view(6, 256)
    want = w4a16.linear(x[:, ::2].clone(), weight, tile=TILES[8])
    assert torch.equal(w4a16.linear(x[:, ::2], weight, tile=TILES[8]), want)


def test_chosen_and_captured_among_others(make_weight, half):
    """A graph of products that share the parts' memory, replayed with new inputs."""
    N, K = 8192, 4096
    assert linear_ring_tile(6, N, K, 128, 4, 132).split > 1
    assert linear_ring_tile(6, K, N, 128, 4, 132).split > 1
    packed = [make_weight(N, K, 128), make_weight(K, N, 128, symmetric=False)]
    weights = [ops.prepare_weight(each, half) for each in packed]
    x = random_x(6, K, half)

    def both():
        hidden = ops.linear(x, weights[0])
        return hidden, ops.linear(hidden, weights[1])

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden, y = both()
    for _ in range(3):
        x.normal_()
        graph.replay()
        for result, given, each in ((hidden, x, packed[0]), (y, hidden, packed[1])):
            want = given.double() @ each.dequantize(torch.float64).t()
            assert float((result.double() - want).norm() / want.norm()) < 4e-3
