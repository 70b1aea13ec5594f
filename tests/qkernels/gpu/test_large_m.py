"""W4A16 and W8A16 of many rows (sm90_large_m) against float64, on an sm_90 GPU."""

import dataclasses

import pytest
import torch

from formats.numerics.bits import pack
from qkernels import ops
from qkernels.gpu.workspace import workspace
from qkernels.wna16.sm90_large_m_config import LargeMConfig, default_large_m_config
from tests.qkernels.plans import multiply

w4a16 = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

pytestmark = pytest.mark.hopper


WHOLE = {
    "64": {"block_m": 64},
    "128": {"block_m": 128},
    "three": {"num_consumers": 3},
    "256": {"block_m": 256},
    "halves": {"block_m": 256, "tail_split": True},
}
PARTS_OF_K = {
    "64 / 4": {"block_m": 64, "split": 4},
    "128 / 2": {"split": 2},
    "128 / 4": {"split": 4},
    "three / 2": {"num_consumers": 3, "split": 2},
    "256 / 2": {"block_m": 256, "split": 2},
}
SHAPES = WHOLE | PARTS_OF_K
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
whole_shapes = pytest.mark.parametrize("shape", WHOLE.values(), ids=list(WHOLE))
both_bits = pytest.mark.parametrize("bits", [4, 8])
parts_of_k = pytest.mark.parametrize("shape", PARTS_OF_K.values(), ids=list(PARTS_OF_K))


def tile_of(shape, bits, M, N, blocks=132):
    """As many blocks as there are units of work, up to `blocks`."""
    tile = LargeMConfig(blocks=blocks, bits=bits, **shape)
    units = tile.tiles(M, N) * tile.split * (2 if tile.tail_split else 1)
    return dataclasses.replace(tile, blocks=min(blocks, units))


def prepared(packed, dtype):
    return ops.prepare_weight(packed, dtype, kernel=f"w{packed.spec.bits}a16")


@pytest.fixture
def check(assert_close, tolerance):
    """One product with tiles of `shape`, whole and by element, twice."""

    def run(packed, x, shape, bias=None, blocks=132):
        tile = tile_of(shape, packed.spec.bits, x.shape[0], packed.out_features, blocks)
        weight = prepared(packed, x.dtype)
        got = multiply(x, weight, bias, tile=tile)
        assert got.dtype == x.dtype
        x, reduced = x.double(), 0 if bias is None else bias.double()
        exact = x @ packed.dequantize(torch.float64).t() + reduced
        assert_close("sm90_large_m", exact, got, min(4e-3, tolerance(got.dtype)))
        # the weight is rounded once; beyond that there are only the sum and its rounding
        weight_NK = packed.dequantize(got.dtype).double()
        want = x @ weight_NK.t() + reduced
        bound = torch.finfo(got.dtype).eps * want.abs() + 2**-14 * (x.abs() @ weight_NK.abs().t())
        assert ((got.double() - want).abs() <= bound).all(), "an element is off"
        again = multiply(x.to(got.dtype), weight, bias, tile=tile)
        assert torch.equal(got, again), "equal inputs, equal bits"
        assert not workspace(got.device)[1].any(), "a counter was left"

    return run


def random_x(M, K, dtype):
    generator = torch.Generator("cuda").manual_seed(M)
    return torch.randn(M, K, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [128, 256, 384, -1])
@pytest.mark.parametrize("shape", [{"split": 4}, {"block_m": 256}], ids=["128 / 4", "256"])
@both_bits
def test_every_group_length(check, make_weight, half, poison, group, symmetric, shape, bits):
    packed = make_weight(200, 768, group, symmetric, spread=8, bits=bits)
    check(packed, random_x(140, 768, half), shape)


@pytest.mark.parametrize("M", [1, 3, 17, 63, 118, 257, 520])
@every_shape
@both_bits
def test_rows_beyond_the_tile_are_not_written(check, make_weight, half, poison, M, shape, bits):
    check(make_weight(136, 512, 128, bits=bits), random_x(M, 512, half), shape)


@pytest.mark.parametrize("N", [8, 24, 72, 136, 1000])
@every_shape
@both_bits
def test_padded_outputs_are_not_written(check, make_weight, half, poison, N, shape, bits):
    bias = torch.randn(N, device="cuda").to(half)
    packed = make_weight(N, 512, 128, symmetric=False, bits=bits)
    check(packed, random_x(130, 512, half), shape, bias)


@pytest.mark.parametrize("blocks", [1, 2, 5, 11])
@pytest.mark.parametrize("K", [128, 384, 1152])
@whole_shapes
@both_bits
def test_persistent_block_continues_with_next_tile(
    check, make_weight, half, poison, K, blocks, shape, bits
):
    """9 to 40 tiles, and halves of them; 128 inputs are fewer steps than are copied ahead."""
    packed = make_weight(504, K, 128, spread=8, bits=bits)
    check(packed, random_x(600, K, half), shape, blocks=blocks)


@pytest.mark.parametrize("K", [512, 640, 1152])
@parts_of_k
@both_bits
def test_splits_of_any_length_are_reduced(check, make_weight, half, poison, K, shape, bits):
    """5 and 9 steps are in no equal parts."""
    check(make_weight(504, K, 128, spread=8, bits=bits), random_x(250, K, half), shape)


def assert_bits_of_packed(packed, dtype, shape):
    """One-hot rows read the matrix back: exact, since each sum has one term."""
    N, K = packed.out_features, packed.in_features
    one_hot = torch.eye(K, dtype=dtype, device="cuda")
    tile = tile_of(shape, packed.spec.bits, K, N)
    got = multiply(one_hot, prepared(packed, dtype), tile=tile)
    assert torch.equal(got.t(), packed.dequantize(dtype))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@every_shape
@both_bits
def test_dequantized_weights_equal_packed_bitwise(make_weight, half, shape, bits, symmetric):
    assert_bits_of_packed(make_weight(200, 512, 128, symmetric, spread=8, bits=bits), half, shape)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@both_bits
def test_code_times_mantissa_is_rounded_once(make_weight, half, bits, symmetric):
    """The 1024 mantissas of float16, times every code less its zero."""
    packed = make_weight(1024, 512, 256, symmetric, bits=bits)
    codes = (torch.arange(512) % 2**bits).to(torch.uint8).expand(1024, 512)
    mantissas = (1 + torch.arange(1024) / 1024)[:, None] * torch.tensor([2**-8, -(2**-3)])
    packed = dataclasses.replace(
        packed, words_NW=pack(codes, bits).cuda(), scales_NG=mantissas.half().cuda()
    )
    assert_bits_of_packed(packed, half, {"block_m": 256})


@both_bits
def test_bfloat16_scales(make_weight, half, bits):
    packed = make_weight(200, 512, 128, bits=bits)
    scales = torch.rand(packed.scales_NG.shape, device="cuda") / 64 + 1e-3
    assert_bits_of_packed(dataclasses.replace(packed, scales_NG=scales.bfloat16()), half, {})


@pytest.mark.parametrize("scale", [2**-23, 60000.0], ids=["tiny", "huge"])
@both_bits
def test_tiny_and_huge_scales(make_weight, bits, scale):
    """In bfloat16, which has the range for all of float16's scales."""
    packed = make_weight(200, 512, 128, symmetric=False, bits=bits)
    scales = torch.full_like(packed.scales_NG, scale)
    packed = dataclasses.replace(packed, scales_NG=scales)
    assert_bits_of_packed(packed, torch.bfloat16, {"block_m": 256})


@parts_of_k
@both_bits
def test_bits_do_not_depend_on_last_arriving_split(make_weight, half, shape, bits):
    M, N, K = 128, 192 if shape.get("num_consumers") == 3 else 512, 4096
    weight = prepared(make_weight(N, K, 128, bits=bits), half)
    x, tile = random_x(M, K, half), tile_of(shape, bits, M, N)
    first = multiply(x, weight, tile=tile)
    for _ in range(100):
        assert torch.equal(multiply(x, weight, tile=tile), first)


def test_unaligned_and_strided_x(make_weight, half):
    weight = prepared(make_weight(136, 128, 128), half)
    x = random_x(1, 2 * 140 * 128 + 1, half)[0, 1:].view(140, 256)
    dense, tile = x[:, ::2].clone(), tile_of({}, 4, 140, 136)
    assert x.data_ptr() % 16 and dense.data_ptr() % 16 == 0
    want = multiply(dense, weight, tile=tile)
    assert torch.equal(multiply(x[:, ::2], weight, tile=tile), want)
    odd = random_x(1, 140 * 128 + 1, half)[0, 1:].view(140, 128)
    assert torch.equal(multiply(odd, weight, tile=tile), multiply(odd.clone(), weight, tile=tile))


@pytest.mark.parametrize("M", [64, 128, 512, 1024])
@both_bits
def test_chosen_config_in_captured_graph(make_weight, half, M, bits):
    """The chosen config is of this variant; a graph replays it with new inputs."""
    N, K = 4096, 4096
    assert default_large_m_config(M, N, K, 128, bits, 132) is not None
    packed = make_weight(N, K, 128, bits=bits)
    weight = ops.prepare_weight(packed, half)
    x = random_x(M, K, half)
    ops.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, weight)
        z = ops.linear(y, weight)
    weight_NK = packed.dequantize(torch.float64)
    for _ in range(3):
        x.normal_()
        graph.replay()
        for got, given in ((y, x), (z, y)):
            want = given.double() @ weight_NK.t()
            assert float((got.double() - want).norm() / want.norm()) < 4e-3


@pytest.mark.parametrize("M", [520, 1032, 1088])
def test_tail_rows_after_whole_tiles(make_weight, half, M):
    """Two kernels compute the product (`rows_of_tiles`), also in a graph."""
    packed = make_weight(4096, 14336, 128)
    weight = ops.prepare_weight(packed, half)
    plan = ops.plan_linear(weight, M)
    assert plan.rows == M // 128 * 128 and plan.tail.variant == "sm90_small_m"
    x, bias = random_x(M, 14336, half), random_x(1, 4096, half)[0]
    ops.linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, weight, bias)
    weight_NK = packed.dequantize(torch.float64)
    for _ in range(2):
        x.normal_()
        graph.replay()
        want = x.double() @ weight_NK.t() + bias.double()
        assert float((y.double() - want).norm() / want.norm()) < 4e-3
        assert torch.equal(y, ops.linear(x, weight, bias))
        assert torch.equal(y[plan.rows :], ops.linear(x[plan.rows :], weight, bias))
