"""4-bit weights with 8-bit inputs: layout, reference, CPU, configs, and who runs what."""

import pytest
import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.numerics.activation import quantize_input
from formats.numerics.multiples import find_multiples
from formats.scheme import ActivationSpec, Scheme
from qkernels import QuantLinear, explain, ops, replace_linears
from qkernels.w4a8 import layout
from qkernels.w4a8.config import (
    default_sm90_config,
    default_triton_config,
    fixed_order_config,
    sm90_config_fault,
    triton_config_fault,
)
from tests.qkernels.w4a8_case import exact_case

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SHAPES |= {"small": (8, 128), "odd": (1160, 2944), "long": (64, 32768)}
ROWS = (1, 7, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 300, 512, 1000, 4096, 20000)
INTEGERS = ("w4a8-g32", "w4a8", "w4a8-channel")
H200_SMS = 132


def rounded(name, N, K, seed=0):
    scheme = Scheme.parse(name)
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    return with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)


GOLDEN = {
    ("int", "k mod 16"): "33221100 77665544 BBAA9988 FFEEDDCC",
    ("int", "floor(k / 2)"): "91918080 B3B3A2A2 D5D5C4C4 F7F7E6E6",
    ("float", "k mod 16"): "CCDDEEFF 8899AABB 33221100 77665544",
    ("float", "floor(k / 2)"): "1E1E0F0F 3C3C2D2D 5A5A4B4B 78786969",
}


@pytest.mark.parametrize("type, codes", GOLDEN)
def test_packed_words_equal_golden_values(type, codes):
    """Golden values of notes/layouts.md."""
    k = torch.arange(32, dtype=torch.uint8)
    codes_1K = (k % 16 if codes == "k mod 16" else k // 2)[None]
    words = layout.tiles_of_codes(codes_1K, type, 32).view(torch.int32)[0, 0, 0]
    assert " ".join(f"{word & 0xFFFFFFFF:08X}" for word in words.tolist()) == GOLDEN[type, codes]


def test_k_step_stores_words_of_a_lane_contiguously():
    """Word c of lane t of 128 inputs is word t of the c-th 32 inputs."""
    codes = torch.randint(0, 16, (70, 256), dtype=torch.uint8)
    long = layout.tiles_of_codes(codes, "int", 128).view(torch.int32)
    short = layout.tiles_of_codes(codes, "int", 32).view(torch.int32)
    assert long.shape == (2, 2, 64, 16) and short.shape == (2, 8, 64, 4)
    assert torch.equal(long[1, 1].view(64, 4, 4)[:, 2, 3], short[1, 7][:, 2])
    padding = layout.tiles_of_codes(codes, "float", 128)[1, 0, 6:]
    assert not padding.any(), "outputs beyond the last are zeros"


@pytest.mark.parametrize("name", [*INTEGERS, "w4a8-fp8", "w4a8-fp8-g32"])
def test_reference_sums_are_exact(name):
    codes_MK, scales_M1, packed, want = exact_case(name, 5, 24, 384, torch.device("cpu"))
    weight = ops.prepare_weight(packed, torch.float32, kernel="reference")
    assert torch.equal(ops.linear_codes(codes_MK, scales_M1, weight).double(), want)


@pytest.mark.parametrize("name", ["w4a8-g32", "w4a8", "w4a8-g512"])
@pytest.mark.parametrize("kernel", ["reference", "cpu_w4a8"])
def test_sums_of_multiples_are_exact_beyond_float32(name, kernel):
    """8,192 products of up to 127 and 120: more than float32 could count."""
    case = exact_case(name, 5, 24, 8192, torch.device("cpu"), multiples=True)
    codes_MK, scales_M1, packed, _ = case
    units_N1, _ = find_multiples(packed.scales_NG)
    whole_NK = packed.dequantize(torch.float64) / units_N1
    codes_MK[1:4] = 127 * whole_NK[1:4].sign()  # all products of these outputs have one sign
    exact = codes_MK.double() @ whole_NK.t()
    assert exact.max() > 2**24 and (exact.float() != exact).any()
    weight = ops.prepare_weight(packed, torch.float32, kernel=kernel)
    assert weight.tensors["int8"].shape[-1] == 8192 and weight.tensors["int8"].abs().max() == 120
    want = exact.float() * scales_M1 * units_N1.t()
    assert torch.equal(ops.linear_codes(codes_MK, scales_M1, weight), want)


def test_reference_is_exact_beyond_float32():
    """A channel's sum of 32,768 products of -128 and -7 is exact, where each product of floats
    would round the sum."""
    K = 32768
    codes_MK, scales_M1, packed, _ = exact_case("w4a8-channel", 2, 8, K, torch.device("cpu"))
    codes_MK[:] = -127
    signed_NK = packed.codes().long() - 8
    exact = (codes_MK.long() @ signed_NK.t()).float()
    want = exact * scales_M1 * packed.scales_NG.float().t()
    for kernel in ("reference", "cpu_w4a8"):
        weight = ops.prepare_weight(packed, torch.float32, kernel=kernel)
        assert torch.equal(ops.linear_codes(codes_MK, scales_M1, weight), want)


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_cpu_equals_reference_bitwise(assert_close, tolerance, name, number):
    packed = rounded(name, 72, 384)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 384, generator=generator).to(number)
    bias = torch.randn(72, generator=generator).to(number)
    found = []
    for kernel in ("cpu_w4a8", "reference", "fixed_order", None):
        weight = ops.prepare_weight(packed, number, kernel=kernel)
        assert weight.kernel == ("reference" if kernel == "reference" else "cpu_w4a8")
        found.append(ops.linear(x, weight, bias))
    assert all(torch.equal(each, found[0]) for each in found)
    codes, scales = quantize_input(x.view(10, 384), packed.activation, None)
    want = (codes.double() * scales.double()) @ packed.dequantize(torch.float64).t()
    assert_close(name, want + bias.double(), found[0].view(10, 72), tolerance(number))


def test_cpu_rows_are_independent():
    packed = rounded("w4a8", 64, 256)
    weight = ops.prepare_weight(packed, torch.float32, kernel="fixed_order")
    x = torch.randn(9, 256)
    want = ops.linear(x, weight)
    assert all(torch.equal(ops.linear(x[i : i + 1], weight), want[i : i + 1]) for i in range(9))


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32", "w4a8-channel", "w4a8-fp8"])
def test_quant_linear_supports_w4a8(name):
    """As the served layer, from a float weight, from codes, and after its state_dict."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 64)
    scheme = Scheme.parse(name)
    layer = QuantLinear.from_float(linear, name)
    packed = layer.packed()
    assert packed.activation == scheme.activation and layer.scheme == scheme
    x = torch.randn(3, 256)
    want = layer(x)
    served = QuantLinear.for_inference(packed, linear.bias.detach(), torch.float32)
    assert torch.equal(served(x), want)
    codes, scales = packed.codes(), packed.scales_NG
    of_codes = QuantLinear.from_codes(codes, scales, scheme=name, bias=linear.bias)
    assert torch.equal(of_codes(x), want)
    empty = QuantLinear(256, 64, name, bias=True)
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), want)
    weight_only = QuantLinear(256, 64, scheme_of_weight(name), bias=True)
    weight_only.load_state_dict(layer.state_dict())
    assert not torch.equal(weight_only(x), want), "x is rounded"
    model = torch.nn.Sequential(linear)
    assert replace_linears(model, name, ignore=[]) == ["0"]
    assert torch.equal(model(x), want)


def scheme_of_weight(name):
    return Scheme(weight=Scheme.parse(name).weight)


def test_quant_linear_gives_x_its_gradient():
    layer = QuantLinear.from_float(torch.nn.Linear(256, 64), "w8a8")
    of_4_bits = QuantLinear.from_float(torch.nn.Linear(256, 64), "w4a8")
    x = torch.randn(3, 256, requires_grad=True)
    assert layer(x).requires_grad == of_4_bits(x).requires_grad


CHOICES = {
    ("w4a8", torch.bfloat16, 4096): "sm90_w4a8",
    ("w4a8-g32", torch.float16, 4096): "sm90_w4a8",
    ("w4a8-channel", torch.bfloat16, 4096): "sm90_w4a8",
    ("w4a8-fp8-g256", torch.bfloat16, 4096): "sm90_w4a8",
    ("w4a8", torch.float32, 4096): "triton_w4a8",
    ("w4a8-g96", torch.bfloat16, 1152): "triton_w4a8",
    ("w4a8-g32", torch.bfloat16, 96): "triton_w4a8",
    ("w4a8-channel", torch.bfloat16, 4128): "triton_w4a8",
    ("w4a8-g8", torch.bfloat16, 4096): "reference",
}


@pytest.mark.parametrize("name, number, K", CHOICES)
def test_gpu_kernel_choice(name, number, K):
    scheme = Scheme.parse(name)
    problem = {"device": "cuda", "dtype": number, "out_features": 64, "in_features": K}
    rows = explain("linear", spec=scheme.weight, activation=scheme.activation, **problem)
    assert next(row.name for row in rows if row.taken) == CHOICES[name, number, K]


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32", "w4a8-fp8", "w4a8-channel"])
def test_explain_says_which_weights_are_summed_as_integers(name):
    scheme = Scheme.parse(name)
    problem = {"device": "cuda", "dtype": torch.bfloat16, "out_features": 64, "in_features": 256}
    rows = explain("linear", spec=scheme.weight, activation=scheme.activation, **problem)
    note = next(row for row in rows if row.name == "sm90_w4a8")
    said = "sm90_multiples if scales of each row are multiples" in str(note)
    assert said == scheme.weight.in_multiples


def test_choice_error_names_unsupported_problem():
    problem = {"device": "cuda", "dtype": torch.bfloat16, "out_features": 64, "in_features": 256}
    spec = Scheme.parse("w4a16-asym").weight
    rows = explain("linear", spec=spec, activation=ActivationSpec(), **problem)
    reason = {row.name: row.reason for row in rows}["sm90_w4a8"]
    assert "takes symmetric 4-bit integer weights" in reason
    per_group = ActivationSpec(per="group", type="float")
    rows = explain("linear", spec=Scheme.parse("w4a8").weight, activation=per_group, **problem)
    reason = {row.name: row.reason for row in rows}["triton_w4a8"]
    assert "a scale for each token" in reason


@pytest.mark.parametrize("group", [32, 128, 256, None], ids=str)
@pytest.mark.parametrize("integers", [True, False], ids=["int8", "float8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_default_configs_are_valid(shape, integers, group):
    N, K = SHAPES[shape]
    if group is not None and K % group:
        pytest.skip("groups do not divide the inputs")
    group = group or K
    for M in ROWS:
        for sms in (16, 78, H200_SMS):
            for choose in (default_sm90_config, fixed_order_config):
                config = choose(M, N, K, group, sms, integers)
                problem = {"M": M, "N": N, "K": K, "group": group, "integers": integers}
                assert sm90_config_fault(config, **problem) is None
                assert config.fits(M, N, K, sms)
                assert config.split == 1 or choose is default_sm90_config or not config.promotes
            config = default_triton_config(M, N, K, layout.k_step(group), sms)
            assert triton_config_fault(config, **problem) is None
            assert config.split <= K // layout.k_step(group)


def test_many_rows_with_groups_use_prefetching_tile():
    """Sums of 64 x 128 and their float32 total take 128 of a thread's 240 registers."""
    config = default_sm90_config(8192, *SHAPES["gate_up"], 128, H200_SMS, True)
    assert (config.num_consumers, config.block_b, config.loads_ahead) == (2, 128, True)
    wide = default_sm90_config(8192, *SHAPES["gate_up"], 4096, H200_SMS, True)
    assert (wide.num_consumers, wide.block_b, wide.promotes) == (2, 256, False)
