"""Products of 4-bit weights and 8-bit inputs of the warp-specialized kernel (sm_90)."""

from dataclasses import replace

import pytest
import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import Scheme
from qkernels import ops
from qkernels.gpu.device import sm_count
from qkernels.gpu.workspace import workspace
from qkernels.tuning import table as tuning_table
from qkernels.w4a8.config import W4A8Sm90Config, default_sm90_config
from qkernels.w4a8.tuned import TUNED as W4A8
from tests.qkernels.gpu.test_fixed_order import assert_rows_are_alone, random_x
from tests.qkernels.w4a8_case import exact_case

sm90 = pytest.importorskip("qkernels.w4a8.sm90", exc_type=ImportError)

pytestmark = pytest.mark.hopper

SMS = 132  # of an H200; at least as many as the tiles of these tests that must be resident
CONFIGS = {
    "one consumer": W4A8Sm90Config(num_consumers=1, block_b=16),
    "two": W4A8Sm90Config(num_consumers=2, block_b=32, blocks_per_sm=2, max_stages=3),
    "three": W4A8Sm90Config(num_consumers=3, block_b=64),
    "prefetch 2 stages": W4A8Sm90Config(num_consumers=1, block_b=64, max_prefetch_stages=2),
    "loads ahead": W4A8Sm90Config(num_consumers=2, block_b=128, loads_ahead=True, group_a=2),
    "split 3": W4A8Sm90Config(
        num_consumers=2, block_b=16, split=3, blocks_per_sm=2, launch_dependents_first=True
    ),
    "scatter 2": W4A8Sm90Config(
        num_consumers=2, block_b=128, split=2, reduce_scatter=True, loads_ahead=True
    ),
    "scatter 4": W4A8Sm90Config(num_consumers=1, block_b=64, split=4, reduce_scatter=True),
}
OF_CHANNELS = {
    "one consumer": W4A8Sm90Config(num_consumers=1, block_b=16, promotes=False),
    "wide": W4A8Sm90Config(num_consumers=2, block_b=256, promotes=False),
    "split 3": W4A8Sm90Config(num_consumers=1, block_b=64, split=3, promotes=False),
    "wide, two tiles at a time": W4A8Sm90Config(
        num_consumers=2, block_b=256, promotes=False, group_a=2
    ),
    "wide, scatter 2": W4A8Sm90Config(
        num_consumers=2, block_b=256, split=2, reduce_scatter=True, promotes=False
    ),
}
GROUPS = ("w4a8-g32", "w4a8-g256", "w4a8-fp8-g64", "w4a8-fp8")
BF16 = torch.bfloat16  # each combination is compiled, which takes seconds
# the last: many tiles for each block
SHAPES = [(1, 8, 512), (17, 72, 768), (63, 200, 1024), (257, 392, 2048), (1500, 4096, 512)]


def check_exact(name, M, N, K, half, config, multiples=False):
    device = torch.device("cuda", 0)
    codes_MK, scales_M1, packed, want = exact_case(name, M, N, K, device, multiples)
    weight = ops.prepare_weight(packed, half, kernel="sm90_w4a8")
    assert weight.problem.in_multiples == multiples
    partials, counters = workspace(device)
    partials.fill_(float("nan"))
    got = sm90.linear_codes(codes_MK, scales_M1, weight, config=config)
    assert torch.equal(got.cpu(), want.to(half))
    again = sm90.linear_codes(codes_MK, scales_M1, weight, config=config)
    assert torch.equal(got, again), "equal inputs, equal bits"
    assert not counters.any(), "the kernel must leave its counters at zero"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", [*GROUPS, "w4a8-fp8-channel"])
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_sums_of_groups_are_exact(poison, name, config, M, N, K):
    """Powers of two as scales: bit for bit, whatever the order of the sums."""
    if not CONFIGS[config].fits(M, N, K, SMS):
        pytest.skip("splits are for few rows")
    check_exact(name, M, N, K, BF16, CONFIGS[config])


@pytest.mark.parametrize("M, N, K", SHAPES)
def test_sums_are_exact_with_the_chosen_config(poison, half, M, N, K):
    check_exact("w4a8", M, N, K, half, None)


@pytest.mark.parametrize("config", OF_CHANNELS)
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_integer_sums_of_channels_are_exact(poison, config, M, N, K):
    if not OF_CHANNELS[config].fits(M, N, K, SMS):
        pytest.skip("splits are for few rows")
    check_exact("w4a8-channel", M, N, K, BF16, OF_CHANNELS[config])


@pytest.mark.parametrize("config", [*OF_CHANNELS, None])
@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g256"])
@pytest.mark.parametrize("M, N, K", [*SHAPES, (300, 1104, 1280), (1500, 4112, 512)])
def test_integer_sums_of_multiples_are_exact(poison, name, config, M, N, K):
    if config is not None and not OF_CHANNELS[config].fits(M, N, K, SMS):
        pytest.skip("splits are for few rows")
    config = None if config is None else OF_CHANNELS[config]
    check_exact(name, M, N, K, BF16, config, multiples=True)


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g64"])
@pytest.mark.parametrize("M", [1, 17, 64, 300, 1025])
def test_splits_of_multiples_have_the_same_bits(poison, name, M):
    """Scales of inputs and outputs of any value; sums are integers in any order."""
    N, K = 1160, 4096
    codes, scales, packed, _ = exact_case(name, M, N, K, torch.device("cuda", 0), multiples=True)
    generator = torch.Generator("cuda").manual_seed(M)
    factor_N1 = 2 * torch.rand(N, 1, device="cuda", generator=generator) + 1
    scales_NG = (packed.scales_NG * 64 * (factor_N1 * 32).round() / 2**14).half()
    packed = replace(packed, scales_NG=scales_NG)
    scales = torch.rand(scales.shape, device="cuda", generator=generator)
    weight = ops.prepare_weight(packed, BF16, kernel="sm90_w4a8")
    assert weight.problem.in_multiples
    want = sm90.linear_codes(codes, scales, weight)
    exact = (codes.double() * scales.double()) @ packed.dequantize(torch.float64).t()
    assert float((want.double() - exact).norm() / exact.norm()) < torch.finfo(BF16).eps / 2
    for config in OF_CHANNELS.values():
        if config.fits(M, N, K, SMS):
            assert torch.equal(sm90.linear_codes(codes, scales, weight, config=config), want)


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g64", "w4a8-channel", "w4a8-fp8"])
@pytest.mark.parametrize("M", [1, 17, 64, 129, 300, 1025])
def test_chosen_configs_equal_portable_kernel(poison, name, M):
    N, K, half = 1160, 4096, BF16
    scheme = Scheme.parse(name)
    generator = torch.Generator("cuda").manual_seed(M)
    weight_NK = torch.randn(N, K, device="cuda", generator=generator)
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    x = torch.randn(M, K, device="cuda", generator=generator).to(half)
    bias_N = torch.randn(N, device="cuda", generator=generator).to(half)
    found = []
    for kernel in ("sm90_w4a8", "triton_w4a8"):
        weight = ops.prepare_weight(packed, half, kernel=kernel)
        assert weight.kernel == kernel
        found.append(ops.linear(x, weight, bias_N).double())
    codes, scales = ops.quantize_input(x, packed.activation)
    want = (codes.double() * scales.double()) @ packed.dequantize(torch.float64).t()
    want += bias_N.double()
    allowed = torch.finfo(half).eps / 2
    for got in found:
        assert float((got - want).norm() / want.norm()) < max(allowed, 1e-3 * ("fp8" in name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("field", W4A8.configs[W4A8Sm90Config].options)
@pytest.mark.parametrize("most", [16, 128])
def test_every_config_near_default_is_correct(most, field):
    """Each value that a search tries of one field, at several numbers of rows of its bucket."""
    device, N, K, half = torch.device("cuda", 0), 1104, 1152, BF16
    codes_MK, scales_M1, packed, want = exact_case("w4a8", most, N, K, device)
    weight = ops.prepare_weight(packed, half)
    table, sms = tuning_table.tuning_table_of(device), sm_count(device)
    problem = {"N": N, "K": K, "group": 128, "integers": True, "M": most}
    default = default_sm90_config(most, N, K, 128, sms, True)
    for config in W4A8.neighbours(default):
        if getattr(config, field) == getattr(default, field) and config.split == default.split:
            continue
        if not W4A8.runs_here(config, problem, sms):
            continue
        row = tuning_table.TuningRow(
            op=W4A8, problem=problem, config=config, microseconds=1.0, default_microseconds=None
        )
        with table.trying(row):
            for M in (most // 2 + 1, most - 1, most):
                got = ops.linear_codes(codes_MK[:M], scales_M1[:M], weight)
                assert row.key in table.taken
                assert torch.equal(got.cpu(), want[:M].to(half)), (config, M)


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32", "w4a8-channel", "w4a8-fp8", "w4a8-fp8-g64"])
@pytest.mark.parametrize("N, K", [(576, 1152), (4096, 4096), (1000, 512)])
def test_fixed_order_rows_are_independent(name, N, K):
    scheme = Scheme.parse(name)
    generator = torch.Generator("cuda").manual_seed(N)
    weight_NK = torch.randn(N, K, device="cuda", generator=generator)
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    weight = ops.prepare_weight(packed, torch.bfloat16, kernel="fixed_order")
    assert weight.kernel == "sm90_w4a8"
    assert_rows_are_alone(lambda x: ops.linear(x, weight), random_x(1100, K))


@pytest.mark.parametrize("name", ["w4a8", "w4a8-fp8"])
def test_captured_graph_repeats_product(name):
    scheme = Scheme.parse(name)
    weight_NK = torch.randn(512, 4096, device="cuda")
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    x = random_x(8, 4096)
    want = ops.linear(x, weight)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = ops.linear(x, weight)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
