"""W4A16 of up to 64 rows (sm90_small_m) against float64, on an sm_90 GPU."""

import pytest
import torch

from qkernels import ops
from qkernels.gpu import device, workspace
from qkernels.operands.split_k import SplitKPartials, split_heads
from qkernels.wna16.sm90_small_m_config import (
    SMALL_M_ROWS,
    SmallMConfig,
    default_small_m_config,
    split_k_config,
)
from tests.qkernels.flat_attention import paged_kv
from tests.qkernels.gpu.products import check_product, check_two_in_a_graph, random_x
from tests.qkernels.plans import multiply

w4a16 = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)
sm90_small_m = pytest.importorskip("qkernels.wna16.sm90_small_m", exc_type=ImportError)
pytestmark = pytest.mark.hopper

TILES = {rows: SmallMConfig(block_m=rows, stages=3) for rows in SMALL_M_ROWS}


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
@pytest.mark.parametrize("blocks_per_sm", [1, 2])
@pytest.mark.parametrize("rows", SMALL_M_ROWS)
def test_every_tile(check, make_weight, half, poison, rows, blocks_per_sm, stages, split):
    """9 steps: parts of unequal length, and a number of stages that divides none."""
    tile = SmallMConfig(block_m=rows, stages=stages, split=split, blocks_per_sm=blocks_per_sm)
    packed = make_weight(328, 1152, 128, symmetric=False)
    check(packed, random_x(rows - 1, 1152, half), tile=tile)


@pytest.mark.parametrize("M", [8, 40])
def test_more_tiles_than_blocks(check, make_weight, half, M):
    """Blocks that go on to a next tile keep their stage."""
    packed = make_weight(128 * 700 + 8, 384, 128)
    check(packed, random_x(M, 384, half))


@pytest.mark.parametrize("rows, split", [(8, 10), (32, 8), (64, 16)])
def test_repeated_products_have_the_same_bits(make_weight, half, rows, split):
    """Bits do not depend on which split arrives last, and counters are reset."""
    weight = ops.prepare_weight(make_weight(2048, 4096, 128), half, kernel="w4a16")
    x = random_x(rows - 1, 4096, half)
    tile = SmallMConfig(block_m=rows, split=split)
    want = multiply(x, weight, tile=tile)
    results = [multiply(x, weight, tile=tile) for _ in range(200)]
    assert all(torch.equal(each, want) for each in results)
    assert not workspace.workspace(x.device)[1].any()


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("N, split", [(8, 2), (328, 1), (328, 9), (1000, 4)])
@pytest.mark.parametrize("rows", SMALL_M_ROWS)
def test_unreduced_splits_equal_reduced_sum(make_weight, half, poison, rows, N, split, with_bias):
    """Added in order they are, to the bit, what the last part would have made of them."""
    weight = ops.prepare_weight(make_weight(N, 1152, 128, symmetric=False), half)
    bias = torch.randn(N, device="cuda").to(half) if with_bias else None
    x = random_x(rows - 1, 1152, half)
    for blocks_per_sm in (1, 2):
        tile = SmallMConfig(block_m=rows, split=split, stages=3, blocks_per_sm=blocks_per_sm)
        parts = sm90_small_m.run_split_k(x, weight, bias, tile)
        assert parts.shape == (split, rows - 1, N)
        want = multiply(x, weight, bias, tile=tile)
        assert torch.equal(SplitKPartials(parts=parts, dtype=half).total(), want)


@pytest.mark.parametrize("consumer", ["norm", "rope"])
@pytest.mark.parametrize("M", [5, 17, 40])
def test_partial_sums_are_read_by_next_operation(make_weight, half, consumer, M):
    """In a graph, replayed with new inputs: what the same operation makes of the sum."""
    packed = [make_weight(1024, 2048, 128, symmetric=False), make_weight(2048, 512, 128)]
    first, second = (ops.prepare_weight(each, half) for each in packed)
    bias = torch.randn(1024, device="cuda").to(half)
    x, residual = random_x(M, 2048, half), random_x(M, 1024, half)
    spec = ops.NormSpec(weight_C=torch.rand(1024, device="cuda").to(half) + 0.5, eps=1e-5)
    pages = [torch.zeros(8, 16, 2, 64, device="cuda", dtype=half) for _ in range(2)]
    cos_sin = torch.rand(64, 64, device="cuda")
    places = torch.arange(M, device="cuda")

    def read(y):
        if consumer == "norm":
            y = ops.norm(y, residual, spec)[0][:, :512]
        else:
            heads = split_heads(y, (12, 2, 2), 64)
            y = ops.rope_write_kv_(
                *heads, cos_sin, places, paged_kv(*pages), places, inputs_ready=True
            )
            y = torch.cat([y[:, :4].flatten(1), *(p.view(-1, 128)[:M] for p in pages)], 1)
        return y, ops.linear(y, second)

    def both():
        y = ops.linear(x, first, bias, ops.plan_linear(first, x.shape[0], consumer))
        assert isinstance(y, SplitKPartials)
        return read(y)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both()
    for _ in range(3):
        x.normal_()
        graph.replay()
        tile = split_k_config(consumer, M, 1024, 2048, 128, 4, device.sm_count(x.device))
        want = read(multiply(x, first, bias, tile=tile))
        for a, b in zip(got, want, strict=True):
            assert (a - b).float().norm() <= 4 * torch.finfo(half).eps * b.float().norm()


def test_splits_with_nan_or_inf_are_summed(make_weight, half):
    weight = ops.prepare_weight(make_weight(136, 1024, 128), half, kernel="w4a16")
    x = random_x(2, 1024, half)
    x.view(torch.int16)[1, 0] = -1
    x[1, 1000] = float("inf")
    got = multiply(x, weight, tile=SmallMConfig(block_m=8, split=8))
    assert got[1].isnan().all() and got[0].isfinite().all()


def test_extreme_codes_and_inputs(check, make_weight, half, poison):
    """The largest possible sum of a step: every code at its extreme."""
    for symmetric in (True, False):
        packed = make_weight(64, 256, 128, symmetric)
        packed.words_NW[:32], packed.words_NW[32:] = 0, -1
        if not symmetric:
            packed.zeros_NG[::2], packed.zeros_NG[1::2] = 0, 15
        x = torch.full((5, 256), 255 / 256, device="cuda", dtype=half)
        x[1], x[2, ::2] = -x[1], -x[2, ::2]
        check(packed, x)


def test_rows_with_nan_or_inf_change_no_others(make_weight, half):
    packed = make_weight(72, 256, 128, symmetric=False)
    weight = ops.prepare_weight(packed, half, kernel="w4a16")
    x = random_x(6, 256, half)
    want = multiply(x, weight, tile=TILES[8])
    x[1, 3], x[2, 255] = float("nan"), float("-inf")
    got = multiply(x, weight, tile=TILES[8])
    assert got[1].isnan().all() and not got[2].isfinite().any()
    assert torch.equal(got[[0, 3, 4, 5]], want[[0, 3, 4, 5]])


def test_chosen_config_in_captured_graph(make_weight, half):
    """A graph of products that share the parts' memory, replayed with new inputs."""
    N, K = 8192, 4096
    assert default_small_m_config(6, N, K, 128, 4, 132).split > 1
    assert default_small_m_config(6, K, N, 128, 4, 132).split > 1
    packed = [make_weight(N, K, 128), make_weight(K, N, 128, symmetric=False)]
    check_two_in_a_graph(packed, random_x(6, K, half))
