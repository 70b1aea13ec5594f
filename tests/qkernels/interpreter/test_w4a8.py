"""Products of 4-bit weights and 8-bit inputs: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch

from formats.in_memory.weights import round_to_nearest, with_activation
from formats.numerics.activation import quantize_input
from formats.scheme import ActivationSpec, Scheme
from qkernels import ops
from qkernels.gpu.workspace import workspace
from qkernels.w4a8 import triton_gemm
from qkernels.w4a8.config import W4A8TritonConfig
from tests.qkernels.w4a8_case import exact_case

CONFIGS = {
    "one split": W4A8TritonConfig(block_m=16, use_tma=False),
    "3 splits": W4A8TritonConfig(block_m=16, split=3),
    "wide": W4A8TritonConfig(block_m=32, block_n=128),
    "wide, 2 splits": W4A8TritonConfig(block_m=64, block_n=128, split=2, use_tma=False),
}
INTEGERS = ("w4a8-g32", "w4a8-g96", "w4a8", "w4a8-channel")
FLOATS = ("w4a8-fp8-g32", "w4a8-fp8", "w4a8-fp8-channel")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", INTEGERS + FLOATS)
@pytest.mark.parametrize("M, N, K", [(1, 8, 384), (17, 72, 384), (63, 200, 768)])
def test_sums_are_exact(device, poison, config, name, M, N, K):
    """Odd rows and outputs; scales that differ between neighbouring groups and outputs."""
    codes_MK, scales_M1, packed, want = exact_case(name, M, N, K, device)
    weight = ops.prepare_weight(packed, torch.float32, kernel="triton_w4a8")
    partials, counters = workspace(device)
    partials.fill_(float("nan"))
    got = triton_gemm.linear_codes(codes_MK, scales_M1, weight, config=CONFIGS[config])
    assert torch.equal(got.cpu().double(), want)
    assert not counters.any(), "the kernel must leave its counters at zero"


@pytest.mark.parametrize("name", INTEGERS + FLOATS)
@pytest.mark.parametrize("M", [1, 5, 33, 118])
def test_product_equals_float64(assert_close, device, dtype, poison, name, M):
    """Rounding of x included; bias; scales spread over rows and groups."""
    N, K = (72, 384) if M > 33 else (136, 1152)
    scheme = Scheme.parse(name)
    generator = torch.Generator().manual_seed(M)
    weight_NK = torch.randn(N, K, generator=generator)
    weight_NK *= 2.0 ** (torch.arange(K) // 32 % 5)
    packed = with_activation(round_to_nearest(weight_NK, scheme.weight), scheme, None)
    x = torch.randn(M, K, generator=generator) * 2 ** (3 * torch.rand(M, 1, generator=generator))
    x, bias = x.to(device, dtype), torch.randn(N, generator=generator).to(device, dtype)
    weight = ops.prepare_weight(packed, dtype, device, kernel="triton_w4a8")
    got = ops.linear(x, weight, bias)
    codes, scales = quantize_input(x.cpu(), packed.activation, None)
    want = (codes.double() * scales.double()) @ packed.dequantize(torch.float64).t()
    want = want + bias.cpu().double()
    assert got.dtype == dtype
    # one rounding to the output's dtype; a tensor core keeps 14 bits of a float8 sum of 128
    allowed = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 1e-6}[dtype]
    float8_allowed = 1e-6 if device.type == "cpu" else 1e-3
    assert_close(name, want, got, max(allowed, float8_allowed if "fp8" in name else 0))


@pytest.mark.parametrize("name", ["w4a8-g32", "w4a8-channel"])
def test_result_equals_reference_bitwise(device, half, poison, name):
    """Scales of any value: a sum rounds after each group, in the order of the reference."""
    scheme = Scheme.parse(name)
    generator = torch.Generator().manual_seed(3)
    packed = round_to_nearest(torch.randn(72, 256, generator=generator), scheme.weight)
    packed = with_activation(packed, scheme, None).to(device)
    x = torch.randn(19, 256, generator=generator).to(device, half)
    codes, scales = ops.quantize_input(x, packed.activation)
    found = [
        ops.linear_codes(codes, scales, ops.prepare_weight(packed, half, kernel=kernel))
        for kernel in ("fixed_order", "reference")
    ]
    if device.type == "cpu" or name == "w4a8-channel":
        assert torch.equal(*found)
    else:  # a GPU multiplies and adds in one instruction
        torch.testing.assert_close(*found, rtol=torch.finfo(half).eps, atol=1e-3)


def test_static_scale_of_x(assert_close, device, half):
    scheme = Scheme.parse("w4a8")
    generator = torch.Generator().manual_seed(0)
    packed = round_to_nearest(torch.randn(64, 256, generator=generator), scheme.weight)
    static = Scheme(weight=scheme.weight, activation=ActivationSpec(dynamic=False, per="tensor"))
    packed = with_activation(packed, static, 0.03).to(device)
    x = torch.randn(9, 256, generator=generator).to(device, half)
    got = ops.linear(x, ops.prepare_weight(packed, half, kernel="triton_w4a8"))
    codes, scales = quantize_input(x.cpu(), static.activation, torch.tensor(0.03))
    want = (codes.double() * scales.double()) @ packed.to("cpu").dequantize(torch.float64).t()
    assert_close("static", want, got, 4e-3)


def test_fixed_order_rows_are_independent(device, half):
    scheme = Scheme.parse("w4a8-g32")
    generator = torch.Generator().manual_seed(0)
    packed = round_to_nearest(torch.randn(72, 1024, generator=generator), scheme.weight)
    packed = with_activation(packed, scheme, None).to(device)
    x = torch.randn(70, 1024, generator=generator).to(device, half)
    weight = ops.prepare_weight(packed, half, kernel="fixed_order")
    want = ops.linear(x, weight)
    for M in (1, 3, 17, 40):
        assert torch.equal(ops.linear(x[:M], weight), want[:M])


def test_nan_in_x_affects_only_its_row(device, half):
    scheme = Scheme.parse("w4a8")
    generator = torch.Generator().manual_seed(0)
    packed = round_to_nearest(torch.randn(64, 256, generator=generator), scheme.weight)
    packed = with_activation(packed, scheme, None).to(device)
    x = torch.randn(3, 256, generator=generator).to(device, half)
    x[1, 5] = float("nan")
    y = ops.linear(x, ops.prepare_weight(packed, half, kernel="triton_w4a8"))
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()
