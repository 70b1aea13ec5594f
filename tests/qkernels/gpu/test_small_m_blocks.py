"""4-bit weights in blocks of a GGUF file on sm_90 (sm90_small_m): bits of weights, and products."""

import pytest
import torch

from formats.in_memory.k_weight import KWeight
from formats.scheme import block_scheme
from qkernels import ops
from qkernels.operands.split_k import SplitKPartials
from qkernels.wna16.sm90_small_m_config import SMALL_M_ROWS, SmallMConfig
from tests.qkernels.gpu.products import random_x
from tests.qkernels.plans import multiply

gemm = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)
sm90_small_m = pytest.importorskip("qkernels.wna16.sm90_small_m", exc_type=ImportError)
pytestmark = pytest.mark.hopper

KINDS = ("q4_k", "q4_1")


def make_blocks(kind, N, K):
    """Random blocks, each with another d and dmin."""
    generator = torch.Generator().manual_seed(N + K)
    weight = KWeight.random((N, K), block_scheme(kind).weight, 0.02, generator)
    blocks = weight.bytes_NX.reshape(-1, weight.kind.num_bytes)
    for at in (0, 2):
        floats = blocks[:, at : at + 2].contiguous().view(torch.float16)
        factors = 2 ** (6 * torch.rand(len(blocks), 1, generator=generator) - 3)
        factors *= torch.randint(0, 2, (len(blocks), 1), generator=generator) * 2 - 1
        blocks[:, at : at + 2] = (floats * factors).half().view(torch.uint8)
    return weight.to("cuda")


def tile(rows, **fields):
    return SmallMConfig(block_m=rows, scales_weights=True, **{"stages": 3, **fields})


@pytest.fixture
def check(assert_close, tolerance):
    """One product against float64 on the weights rounded to x's dtype, twice."""

    def run(weight, x, bias=None, config=None):
        prepared = ops.prepare_weight(weight, x.dtype)
        got = multiply(x, prepared, bias, tile=config)
        weight_NK = weight.dequantize(x.dtype).double()
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
def test_weights_equal_gguf_py_bitwise(half, poison, rows, blocks_per_sm, kind):
    """One-hot rows read the matrix back: exact, since each sum has one term."""
    weight = make_blocks(kind, 200, 768)
    prepared = ops.prepare_weight(weight, half)
    want = weight.dequantize(half).t()
    for x, wanted in zip(
        torch.eye(768, dtype=half, device="cuda").split(rows), want.split(rows), strict=True
    ):
        got = multiply(x.contiguous(), prepared, tile=tile(rows, blocks_per_sm=blocks_per_sm))
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "split", "num_consumers"), [(1, 9, 2), (4, 1, 2), (3, 2, 1)])
@pytest.mark.parametrize("rows", SMALL_M_ROWS)
def test_every_tile(check, half, poison, rows, stages, split, num_consumers, kind):
    """10 steps: splits of unequal length, some of which begin inside a block of 256."""
    config = tile(rows, stages=stages, split=split, num_consumers=num_consumers)
    bias = torch.randn(328, device="cuda", dtype=half)
    check(make_blocks(kind, 328, 1280), random_x(rows - 1, 1280, half), bias, config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [1, 5, 16, 33, 64, 300])
def test_chosen_config(check, half, poison, M, kind):
    check(make_blocks(kind, 1000, 2048), random_x(M, 2048, half))
    prepared = ops.prepare_weight(make_blocks(kind, 200, 512), half)
    variant = ops.plan_linear(prepared, M, "norm").variant
    assert variant == ("sm90_small_m" if M <= 64 else "triton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, split", [(8, 2), (328, 1), (1000, 5)])
@pytest.mark.parametrize("rows", SMALL_M_ROWS)
def test_unreduced_splits_equal_reduced_sum(half, poison, rows, N, split, kind):
    """Added in order they are, to the bit, what the last split would have made of them."""
    prepared = ops.prepare_weight(make_blocks(kind, N, 1280), half)
    x, config = random_x(rows - 1, 1280, half), tile(rows, split=split)
    parts = sm90_small_m.run_split_k(x, prepared, None, config)
    want = multiply(x, prepared, tile=config)
    assert torch.equal(SplitKPartials(parts=parts, dtype=half).total(), want)
    bias = torch.randn(N, device="cuda").to(half)
    parts = sm90_small_m.run_split_k(x, prepared, bias, config)
    total = SplitKPartials(parts=parts, dtype=half).total().float()
    want = multiply(x, prepared, bias, tile=config).float()
    assert (total - want).norm() <= 2 * torch.finfo(half).eps * want.norm()


def test_norm_reduces_the_splits(half):
    """Rows with adapters take the sum: they are added after the product."""
    weight = make_blocks("q4_k", 1024, 4096)
    prepared = ops.prepare_weight(weight, half)
    x, residual = random_x(17, 4096, half), random_x(17, 1024, half)
    spec = ops.NormSpec(weight_C=torch.ones(1024, device="cuda", dtype=half), eps=1e-5)
    y = ops.linear(x, prepared, None, ops.plan_linear(prepared, 17, "norm"))
    assert isinstance(y, SplitKPartials)
    got, want = (ops.norm(each, residual, spec)[0] for each in (y, ops.linear(x, prepared)))
    assert (got - want).float().norm() <= 4 * torch.finfo(half).eps * want.float().norm()
    adapted = ops.plan_linear(prepared, 17, "norm", adapted=(1024,))
    assert not adapted.adds_adapters and adapted.output == "sum"


@pytest.mark.parametrize("inputs", [(0, 512), (128, 640), (384, 1280), (64, 704)])
def test_shards_of_blocks(check, half, poison, inputs):
    shard = make_blocks("q4_k", 136, 1280).take_inputs(*inputs)
    check(shard, random_x(7, shard.in_features, half))


@pytest.mark.parametrize("M", [8, 40])
def test_more_tiles_than_blocks(check, half, M):
    check(make_blocks("q4_k", 128 * 300 + 8, 512), random_x(M, 512, half))


def test_captured_graph_runs_on_new_inputs(half):
    weight = make_blocks("q4_k", 512, 1024)
    prepared = ops.prepare_weight(weight, half)
    x = random_x(16, 1024, half)
    ops.linear(x, prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, prepared)
    want_NK = weight.dequantize(half).double()
    for _ in range(3):
        x.normal_()
        graph.replay()
        want = x.double() @ want_NK.t()
        assert float((y.double() - want).norm() / want.norm()) < 4e-3


@pytest.mark.parametrize("kind", [*KINDS, "q5_k", "q6_k"])
def test_fixed_order_rows_have_same_bits_in_any_batch(half, kind):
    prepared = ops.prepare_weight(make_blocks(kind, 264, 1024), half, kernel="fixed_order")
    x = random_x(200, 1024, half)
    whole = ops.linear(x, prepared)
    for rows in (1, 3, 17, 64, 100):
        assert torch.equal(ops.linear(x[:rows].contiguous(), prepared), whole[:rows])
