"""4-bit floats on sm_90 (sm90_small_m): bits of weights, and products."""

import pytest
import torch

from qkernels import ops
from qkernels.operands.split_k import SplitKPartials
from qkernels.wna16.sm90_small_m_config import SMALL_M_ROWS, SmallMConfig
from tests.qkernels.fp4_case import KINDS, random_fp4
from tests.qkernels.gpu.products import random_x
from tests.qkernels.plans import multiply

sm90_small_m = pytest.importorskip("qkernels.wna16.sm90_small_m", exc_type=ImportError)
pytestmark = pytest.mark.hopper


def tile(rows, **fields):
    return SmallMConfig(block_m=rows, scales_weights=True, **{"stages": 3, **fields})


@pytest.fixture
def check(assert_close, tolerance):
    """One product against float64 on the exact weights, twice."""

    def run(weight, x, bias=None, config=None):
        prepared = ops.prepare_weight(weight, x.dtype)
        got = multiply(x, prepared, bias, tile=config)
        weight_NK = weight.dequantize(torch.float64)
        want = x.double() @ weight_NK.t() + (0 if bias is None else bias.double())
        assert_close(weight.spec.type, want, got, min(4e-3, tolerance(got.dtype)))
        info = torch.finfo(got.dtype)
        bound = info.eps * want.abs().clamp(min=info.smallest_normal) + 2**-14 * (
            x.double().abs() @ weight_NK.abs().t()
        )
        assert ((got.double() - want).abs() <= bound).all(), "an element is off"
        assert torch.equal(got, multiply(x, prepared, bias, tile=config)), "equal inputs"

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", SMALL_M_ROWS)
@pytest.mark.parametrize("blocks_per_sm", [1, 2])
@pytest.mark.parametrize("K", [768, 1504])
def test_weights_equal_file_bitwise(half, poison, rows, blocks_per_sm, kind, K):
    """One-hot rows read the matrix back: exact, since each sum has one term."""
    weight = random_fp4(kind, 200, K, spread=8).to("cuda")
    prepared = ops.prepare_weight(weight, half)
    want = weight.dequantize(half).t()
    for x, wanted in zip(
        torch.eye(K, dtype=half, device="cuda").split(rows), want.split(rows), strict=True
    ):
        got = multiply(x.contiguous(), prepared, tile=tile(rows, blocks_per_sm=blocks_per_sm))
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "split", "num_consumers"), [(1, 9, 2), (4, 1, 2), (3, 2, 1)])
@pytest.mark.parametrize("rows", SMALL_M_ROWS)
def test_every_tile(check, half, poison, rows, stages, split, num_consumers, kind):
    """10 steps, of which the last is half full: splits of unequal length."""
    config = tile(rows, stages=stages, split=split, num_consumers=num_consumers)
    bias = torch.randn(328, device="cuda", dtype=half)
    check(random_fp4(kind, 328, 1216).to("cuda"), random_x(rows - 1, 1216, half), bias, config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [1, 5, 16, 33, 64, 300])
def test_chosen_config(check, half, poison, M, kind):
    check(random_fp4(kind, 1000, 2880).to("cuda"), random_x(M, 2880, half))
    prepared = ops.prepare_weight(random_fp4(kind, 200, 512).to("cuda"), half)
    variant = ops.plan_linear(prepared, M, "norm").variant
    assert variant == ("sm90_small_m" if M <= 64 else "triton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, split", [(8, 2), (328, 1), (1000, 5)])
@pytest.mark.parametrize("rows", SMALL_M_ROWS)
def test_unreduced_splits_equal_reduced_sum(half, poison, rows, N, split, kind):
    """Added in order they are what the last split would have made of them."""
    prepared = ops.prepare_weight(random_fp4(kind, N, 1280).to("cuda"), half)
    x, config = random_x(rows - 1, 1280, half), tile(rows, split=split)
    bias = torch.randn(N, device="cuda").to(half)
    parts = sm90_small_m.run_split_k(x, prepared, bias, config)
    total = SplitKPartials(parts=parts, dtype=half).total().float()
    want = multiply(x, prepared, bias, tile=config).float()
    assert (total - want).norm() <= 2 * torch.finfo(half).eps * want.norm()


@pytest.mark.parametrize("M", [8, 40])
def test_more_tiles_than_blocks(check, half, M):
    check(random_fp4("mxfp4", 128 * 300 + 8, 512).to("cuda"), random_x(M, 512, half))


def test_captured_graph_runs_on_new_inputs(half):
    weight = random_fp4("nvfp4", 512, 1024).to("cuda")
    prepared = ops.prepare_weight(weight, half)
    x = random_x(16, 1024, half)
    ops.linear(x, prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, prepared)
    want_NK = weight.dequantize(torch.float64)
    for _ in range(3):
        x.normal_()
        graph.replay()
        want = x.double() @ want_NK.t()
        assert float((y.double() - want).norm() / want.norm()) < 4e-3


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_order_rows_have_same_bits_in_any_batch(half, kind):
    weight = random_fp4(kind, 264, 1024).to("cuda")
    prepared = ops.prepare_weight(weight, half, kernel="fixed_order")
    x = random_x(200, 1024, half)
    whole = ops.linear(x, prepared)
    for rows in (1, 3, 17, 64, 100):
        assert torch.equal(ops.linear(x[:rows].contiguous(), prepared), whole[:rows])
