"""W4A8 of few rows of int8 inputs on mma.sync, on an sm_90 GPU."""

from dataclasses import replace

import pytest
import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels import ops
from qkernels.gpu.device import sm_count
from qkernels.tuning import table as tuning_table
from qkernels.w4a8.gemv_config import (
    GEMV,
    GEMV_MAX_ROWS,
    MAX_WARP_STEPS,
    W4A8GemvConfig,
    default_gemv_config,
)
from qkernels.w4a8.tuned import TUNED as W4A8
from tests.qkernels.w4a8_case import exact_case

sm90 = pytest.importorskip("qkernels.w4a8.sm90", exc_type=ImportError)

pytestmark = pytest.mark.hopper

BF16 = torch.bfloat16
# rows, outputs, warps, K steps in flight
CONFIGS = (
    *((8, 16, 8, 1), (8, 16, 8, 4), (8, 16, 16, 2), (8, 32, 4, 2), (8, 32, 16, 1), (8, 32, 1, 4)),
    *((8, 64, 8, 1), (8, 64, 4, 2), (16, 16, 8, 2), (16, 32, 8, 2), (16, 64, 4, 1)),
    (16, 64, 16, 4),
)
NAMES = ("w4a8-g32", "w4a8-g64", "w4a8", "w4a8-g256", "w4a8-channel")
KINDS = pytest.mark.parametrize("multiples", [False, True], ids=["scales", "multiples"])


def default(M, N, K):
    return default_gemv_config(M, N, K, sm_count(torch.device("cuda", 0)))


def check_exact(name, M, N, K, half, config, multiples):
    """Powers of two as units, and x whose sums float32 holds: bit for bit, twice."""
    device = torch.device("cuda", 0)
    codes_MK, scales_M1, packed, want = exact_case(name, M, N, K, device, multiples)
    weight = ops.prepare_weight(packed, half, kernel="sm90_w4a8")
    got = sm90.linear_codes(codes_MK, scales_M1, weight, config=config)
    assert torch.equal(got.cpu(), want.to(half))
    again = sm90.linear_codes(codes_MK, scales_M1, weight, config=config)
    assert torch.equal(got, again), "equal inputs, equal bits"


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_every_group_length_and_number_of_rows(poison, name, multiples):
    """9 K steps are no multiple of those in flight, 32 are; 200 outputs end within a tile."""
    for N, K in ((200, 1152 if name != "w4a8-g256" else 1280), (72, 4096)):
        for M in range(1, GEMV_MAX_ROWS + 1):
            check_exact(name, M, N, K, BF16, default(M, N, K), multiples)


@pytest.mark.parametrize("name", ["w4a8", "w4a8-channel"])
def test_float16_results(poison, name):
    check_exact(name, 3, 200, 1152, torch.float16, W4A8GemvConfig(), True)


@KINDS
@pytest.mark.parametrize("name", ["w4a8", "w4a8-g64"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_value_of_a_config(poison, config, name, multiples):
    """9 and 16 K steps, for both forms of the loop."""
    block_m, block_n, warps, steps_in_flight = config
    config = W4A8GemvConfig(
        block_m=block_m, block_n=block_n, warps=warps, steps_in_flight=steps_in_flight
    )
    for K in (1152, 2048):
        check_exact(name, block_m - 1, 136, K, BF16, config, multiples)


@pytest.mark.parametrize("name", ["w4a8", "w4a8-channel"])
def test_largest_sums(poison, name):
    """All products of an output have one sign, in as many K steps as a warp may have."""
    config = W4A8GemvConfig(warps=4, steps_in_flight=1)
    K = min(32768, config.warps * MAX_WARP_STEPS * 128)
    device = torch.device("cuda", 0)
    codes_MK, scales_M1, packed, _ = exact_case(name, 2, 72, K, device, multiples=name == "w4a8")
    codes_MK[0], codes_MK[1] = -128, 127
    packed.words_NW[:40], packed.words_NW[40:] = 0, -1
    if name == "w4a8":
        packed.scales_NG[:] = 15 / 64
    weight = ops.prepare_weight(packed, BF16, kernel="sm90_w4a8")
    got = sm90.linear_codes(codes_MK, scales_M1, weight, config=config)
    exact = (codes_MK.double() * scales_M1.double()) @ packed.dequantize(torch.float64).t()
    assert float(((got.double() - exact) / exact).abs().max()) <= 0.501 * torch.finfo(BF16).eps


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g64", "w4a8-channel"])
@pytest.mark.parametrize("M", [1, 2, 7, 8, 16])
def test_integer_sums_have_the_bits_of_the_other_kernel(poison, name, M):
    """Scales of inputs and outputs of any value."""
    N, K = 1160, 4096
    codes, scales, packed, _ = exact_case(name, M, N, K, torch.device("cuda", 0), multiples=True)
    generator = torch.Generator("cuda").manual_seed(M)
    factor_N1 = 2 * torch.rand(N, 1, device="cuda", generator=generator) + 1
    packed = replace(
        packed, scales_NG=(packed.scales_NG * 64 * (factor_N1 * 32).round() / 2**14).half()
    )
    scales = torch.rand(scales.shape, device="cuda", generator=generator)
    found = []
    for kernel in ("sm90", GEMV):
        weight = ops.prepare_weight(packed, BF16, kernel=kernel)
        assert weight.problem.in_multiples == (name != "w4a8-channel")
        assert (ops.plan_linear(weight, M).variant == GEMV) == (kernel == GEMV)
        found.append(ops.linear_codes(codes, scales, weight))
    assert torch.equal(*found)


@KINDS
@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32"])
@pytest.mark.parametrize("N, K", [(6144, 4096), (4096, 14336), (28672, 4096), (8, 768)])
def test_random_weights_equal_float64(poison, name, N, K, multiples):
    """With a bias, from 16-bit x, in the config that is chosen for the shape."""
    scheme = Scheme.parse(name)
    generator = torch.Generator("cuda").manual_seed(N + K)
    weight_NK = torch.randn(N, K, device="cuda", generator=generator)
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    if not multiples:
        scales_NG = packed.scales_NG.clone()
        scales_NG[0, 0] *= 1.05  # output 0 has no multiples of one number
        packed = replace(packed, scales_NG=scales_NG)
    bias_N = torch.randn(N, device="cuda", generator=generator).to(BF16)
    weight = ops.prepare_weight(packed, BF16, kernel=GEMV)
    assert weight.problem.in_multiples == multiples
    exact_NK = packed.dequantize(torch.float64)
    for M in (1, 4, 8, 11, 16):
        assert ops.plan_linear(weight, M).variant == GEMV
        x = torch.randn(M, K, device="cuda", generator=generator).to(BF16)
        got = ops.linear(x, weight, bias_N).double()
        codes, scales = ops.quantize_input(x, packed.activation)
        want = (codes.double() * scales.double()) @ exact_NK.t() + bias_N.double()
        assert float((got - want).norm() / want.norm()) < torch.finfo(BF16).eps / 2, M


def test_rows_do_not_touch_each_other(poison):
    device = torch.device("cuda", 0)
    codes_MK, scales_M1, packed, _ = exact_case("w4a8", 8, 200, 4096, device)
    weight = ops.prepare_weight(packed, BF16, kernel=GEMV)
    want = ops.linear_codes(codes_MK, scales_M1, weight)
    codes_MK[3], scales_M1[3] = 127, float("nan")
    got = ops.linear_codes(codes_MK, scales_M1, weight)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert got[3].isnan().all() and torch.equal(got[others], want[others])


def test_graph_of_consecutive_products_waits_for_inputs():
    """Each product reads codes that the kernel before it in the graph has just written."""
    packed = []
    for seed, (N, K) in enumerate(((1024, 4096), (4096, 1024))):
        scheme = Scheme.parse("w4a8")
        generator = torch.Generator("cuda").manual_seed(seed)
        weight_NK = torch.randn(N, K, device="cuda", generator=generator)
        packed.append(with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None))
    weights = [ops.prepare_weight(each, BF16, kernel=GEMV) for each in packed]
    x = torch.randn(2, 4096, device="cuda").to(BF16)

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
            codes, scales = ops.quantize_input(given, each.activation)
            want = (codes.double() * scales.double()) @ each.dequantize(torch.float64).t()
            assert float((result.double() - want).norm() / want.norm()) < 4e-3


def test_measured_config_is_taken():
    device, N, K, half = torch.device("cuda", 0), 1104, 1152, BF16
    codes_MK, scales_M1, packed, want = exact_case("w4a8", 16, N, K, device)
    weight = ops.prepare_weight(packed, half)
    table, config = tuning_table.tuning_table_of(device), W4A8GemvConfig(block_m=16, warps=4)
    problem = {"N": N, "K": K, "group": 128, "integers": True, "M": 16}
    row = tuning_table.TuningRow(
        op=W4A8, problem=problem, config=config, microseconds=1.0, default_microseconds=None
    )
    with table.trying(row):
        for M in (9, 16):
            assert ops.plan_linear(weight, M).variant == GEMV
            got = ops.linear_codes(codes_MK[:M], scales_M1[:M], weight)
            assert row.key in table.taken
            assert torch.equal(got.cpu(), want[:M].to(half))
