"""8-bit products of the warp-specialized kernel, which only an sm_90 GPU runs."""

import pytest
import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels import ops
from qkernels.gpu.workspace import workspace
from qkernels.linear.prepared import PreparedWeight
from qkernels.w8a8.config import W8A8Sm90Config, default_sm90_config

sm90 = pytest.importorskip("qkernels.w8a8.sm90", exc_type=ImportError)

pytestmark = pytest.mark.hopper

SMS = 132  # of an H200; these tests never need more resident blocks

TILES = {
    "one consumer": W8A8Sm90Config(num_consumers=1, block_b=16),
    "two": W8A8Sm90Config(num_consumers=2, block_b=32),
    "prefetch 2 stages": W8A8Sm90Config(num_consumers=1, block_b=64, max_prefetch_stages=2),
    "prefetch all stages": W8A8Sm90Config(num_consumers=1, block_b=64, max_prefetch_stages=24),
    "three": W8A8Sm90Config(num_consumers=3, block_b=256),
    "split 2": W8A8Sm90Config(num_consumers=1, block_b=128, split=2),
    "split 3": W8A8Sm90Config(num_consumers=2, block_b=64, split=3),
    "x is A": W8A8Sm90Config(num_consumers=2, block_b=128, weight_is_a=False, group_a=2),
    "x is A, tall": W8A8Sm90Config(
        num_consumers=2,
        consumer_rows=128,
        block_b=128,
        weight_is_a=False,
        group_a=16,
        store_stages=1,
    ),
    "x is A, split 4": W8A8Sm90Config(num_consumers=2, block_b=64, weight_is_a=False, split=4),
    "wide": W8A8Sm90Config(num_consumers=2, block_b=256),
    "scatter 2": W8A8Sm90Config(num_consumers=1, block_b=128, split=2, reduce_scatter=True),
    "scatter 4": W8A8Sm90Config(num_consumers=3, block_b=128, split=4, reduce_scatter=True),
    "wide, scatter 2": W8A8Sm90Config(num_consumers=2, block_b=256, split=2, reduce_scatter=True),
    "x is A, tall, scatter 4": W8A8Sm90Config(
        num_consumers=2,
        consumer_rows=128,
        block_b=128,
        weight_is_a=False,
        split=4,
        reduce_scatter=True,
        store_stages=1,
    ),
    "48 of 64 rows": W8A8Sm90Config(num_consumers=1, block_b=64, idle_rows=16),
    "32 of 64 rows": W8A8Sm90Config(num_consumers=1, block_b=128, idle_rows=32),
    "twice 48 rows": W8A8Sm90Config(num_consumers=2, block_b=16, idle_rows=16),
    "48 rows, split 3": W8A8Sm90Config(num_consumers=1, block_b=32, idle_rows=16, split=3),
    "32 rows, scatter 2": W8A8Sm90Config(
        num_consumers=1, block_b=128, idle_rows=32, split=2, reduce_scatter=True
    ),
}
# the last: many tiles for each block, and fewer steps than stages. 480 outputs are tiles of 48 too
SHAPES = [(1, 8, 512), (3, 24, 544), (63, 200, 1056), (118, 1000, 992), (257, 392, 4096)]
SHAPES += [(130, 480, 992)]
SHAPES += [(1500, 4096, 512)]


def random_codes(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda", generator=generator)


def prepared(codes_NK, scales_N, dtype, name="w8a8"):
    scheme = Scheme.parse(name)
    return PreparedWeight(
        kernel="sm90_w8a8",
        tensors={"codes": sm90.in_tma_boxes(codes_NK), "scales": scales_N},
        spec=scheme.weight,
        out_features=codes_NK.shape[0],
        in_features=codes_NK.shape[1],
        dtype=dtype,
        activation=scheme.activation,
    )


def exact(codes_MK, scales_M1, codes_NK, scales_N, bias_N=None):
    """As the kernel rounds: the sum to float32, then each product, then the result."""
    y_MN = (codes_MK.double() @ codes_NK.double().t()).float() * scales_M1 * scales_N
    return y_MN if bias_N is None else y_MN + bias_N.float()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_integer_sums_are_exact(poison, half, tile, M, N, K):
    """Powers of two as scales: bit for bit, whatever the order of the products."""
    if not TILES[tile].fits(M, N, SMS):
        pytest.skip("parts of K are for few rows, idle rows for outputs that tiles divide")
    codes_MK, codes_NK = random_codes(M, K, seed=M), random_codes(N, K, seed=N)
    codes_MK[0], codes_NK[0], codes_NK[-1] = -128, -128, 127  # the largest sums there are
    scales_M1 = 2.0 ** torch.randint(-9, -6, (M, 1), device="cuda")
    scales_N = 2.0 ** torch.randint(-9, -6, (N,), device="cuda")
    weight = prepared(codes_NK, scales_N, half)
    partials, counters = workspace(torch.device("cuda", 0))
    partials.fill_(float("nan"))
    got = sm90.linear_codes(codes_MK, scales_M1, weight, config=TILES[tile])
    assert torch.equal(got, exact(codes_MK, scales_M1, codes_NK, scales_N).to(half))
    again = sm90.linear_codes(codes_MK, scales_M1, weight, config=TILES[tile])
    assert torch.equal(got, again), "equal inputs, equal bits"
    assert not counters.any(), "the kernel must leave its counters at zero"


@pytest.mark.parametrize(
    "tile",
    ["two", "x is A", "wide", "x is A, tall", "scatter 4", "x is A, tall, scatter 4"]
    + ["48 of 64 rows", "twice 48 rows"],
)
def test_bias_and_scales_of_any_value(assert_close, tolerance, poison, half, tile):
    M, N, K = 77, 144, 608
    codes_MK, codes_NK = random_codes(M, K), random_codes(N, K, seed=1)
    scales_M1, scales_N = torch.rand(M, 1, device="cuda") / 99, torch.rand(N, device="cuda")
    bias_N = torch.randn(N, device="cuda").to(half) * 9
    weight = prepared(codes_NK, scales_N, half)
    got = sm90.linear_codes(codes_MK, scales_M1, weight, bias_N, config=TILES[tile])
    want = exact(codes_MK.double(), scales_M1.double(), codes_NK, scales_N.double(), bias_N)
    assert_close(tile, want, got, tolerance(half))
    worst = (got.double() - want).abs() / want.abs().clamp(min=1e-2)
    assert worst.max() < 2 * torch.finfo(half).eps


@pytest.mark.parametrize("name", ["w8a8", "w8a8-static", "w8a8-fp8", "w8a8-fp8-static"])
@pytest.mark.parametrize("M", [1, 17, 64, 65, 129, 300, 1025])
@pytest.mark.parametrize("N, K", [(1160, 1184), (1152, 4096)])
def test_chosen_configs_equal_portable_kernel(half, poison, name, M, N, K):
    scheme = Scheme.parse(name)
    generator = torch.Generator("cuda").manual_seed(M)
    weight_NK = torch.randn(N, K, device="cuda", generator=generator)
    packed = with_activation(
        round_to_nearest(weight_NK, scheme.weight), scheme, 0.03 if "static" in name else None
    ).to("cuda")
    x = torch.randn(M, K, device="cuda", generator=generator).to(half)
    weight = ops.prepare_weight(packed, half)
    assert weight.kernel == "sm90_w8a8"
    got = ops.linear(x, weight)
    want = ops.linear(x, ops.prepare_weight(packed, half, kernel="triton_w8a8"))
    if "fp8" in name:  # other sums are cut to 14 bits
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 2e-3
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "split, reduce_scatter", [(1, False), (2, False), (2, True), (3, False), (4, True)]
)
@pytest.mark.parametrize("idle_rows", [0, 16])
def test_float8_sums(assert_close, tolerance, half, poison, split, reduce_scatter, idle_rows):
    """Whatever an idle row has from the stage before, NaN included, stays in its row."""
    M, N, K = 100, 288, 1408
    generator = torch.Generator("cuda").manual_seed(split)
    codes = [
        torch.randn(rows, K, device="cuda", generator=generator).to(torch.float8_e4m3fn)
        for rows in (M, N)
    ]
    scales_M1, scales_N = torch.rand(M, 1, device="cuda"), torch.rand(N, device="cuda") / 64
    weight = prepared(codes[1], scales_N, half, "w8a8-fp8")
    how = {
        "split": split,
        "reduce_scatter": reduce_scatter,
        "promotion_steps": 1,
        "idle_rows": idle_rows,
    }
    tile = W8A8Sm90Config(num_consumers=2, block_b=64, **how)
    got = sm90.linear_codes(codes[0], scales_M1, weight, config=tile)
    want = exact(codes[0].double(), scales_M1.double(), codes[1], scales_N.double())
    assert_close("float8", want, got, tolerance(half))
    for _ in range(5):
        assert torch.equal(got, sm90.linear_codes(codes[0], scales_M1, weight, config=tile))


def test_strided_and_empty_codes(half):
    codes_NK, scales_N = random_codes(64, 96), torch.rand(64, device="cuda")
    weight = prepared(codes_NK, scales_N, half)
    wide_MK = random_codes(14, 192, seed=2)
    scales = torch.rand(14, 2, device="cuda") / 99
    dense = sm90.linear_codes(wide_MK[::2, :96].contiguous(), scales[::2, :1], weight)
    assert torch.equal(sm90.linear_codes(wide_MK[::2, :96], scales[::2, :1], weight), dense)
    assert torch.equal(
        ops.linear_codes(wide_MK[3:4, 96:], scales[3:4, 1:], weight),
        sm90.linear_codes(wide_MK[3:4, 96:].clone(), scales[3:4, 1:].clone(), weight),
    )
    assert sm90.linear_codes(wide_MK[:0, :96], scales[:0, :1], weight).shape == (0, 64)


@pytest.mark.parametrize("M", [1, 100, 700])
def test_captured_chain_reads_new_inputs(half, M):
    """Each product copies its first weights while the kernels before it still run."""
    shapes = ((4096, 4096), (14336, 4096), (4096, 14336))
    scheme = Scheme.parse("w8a8")
    weights = []
    for N, K in shapes:
        packed = round_to_nearest(torch.randn(N, K, device="cuda") / K**0.5, scheme.weight)
        weights.append(ops.prepare_weight(with_activation(packed, scheme, None), half))
    x = torch.randn(M, 4096, device="cuda").to(half)

    def chain():
        y = x
        for weight in weights:
            y = ops.linear(y, weight)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        want = x
        for weight in weights:
            want = ops.linear(want, weight)
            torch.cuda.synchronize()
        assert torch.equal(y, want)


def test_configs_of_real_shapes_fit_the_gpu(half):
    for M in (1, 16, 64, 128, 256, 1024, 4096):
        for N, K in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            tile = default_sm90_config(M, N, K, 132)
            codes_MK, codes_NK = random_codes(M, K), random_codes(N, K)
            scales = torch.ones(max(M, N), 1, device="cuda") / 2**17
            weight = prepared(codes_NK, scales[:N, 0].contiguous(), half)
            got = sm90.linear_codes(codes_MK, scales[:M], weight, config=tile)
            rows = slice(max(0, M - 40), M)
            want = exact(codes_MK[rows], scales[:M][rows], codes_NK, scales[:N, 0]).to(half)
            assert torch.equal(got[rows], want), (M, N, K)


@pytest.mark.parametrize("M", [1, 17, 64, 100, 257, 700])
@pytest.mark.parametrize("N", [72, 1160])
def test_float8_block_scales_equal_portable_kernel(assert_close, tolerance, half, poison, M, N):
    K, scheme = 1664, Scheme.parse("w8a8-fp8-block")
    generator = torch.Generator("cuda").manual_seed(M)
    weight_NK = torch.randn(N, K, device="cuda", generator=generator)
    weight_NK *= 2.0 ** (torch.arange(N, device="cuda") // 128 % 5)[:, None]
    weight_NK *= 2.0 ** (torch.arange(K, device="cuda") // 128 % 3)
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    bias = torch.randn(N, device="cuda").to(half)
    x = torch.randn(M, K, device="cuda", generator=generator)
    x = (x * 2.0 ** (torch.arange(K, device="cuda") // 128 % 4)).to(half)
    weight = ops.prepare_weight(packed, half)
    assert weight.kernel == "sm90_w8a8"
    got = ops.linear(x, weight, bias)
    want = ops.linear(x.double().float(), ops.prepare_weight(packed, torch.float32), bias.float())
    assert_close("blocks", want, got, tolerance(half))
    assert torch.equal(got, ops.linear(x, weight, bias)), "equal inputs, equal bits"
