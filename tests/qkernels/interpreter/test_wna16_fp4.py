"""Weights in 4-bit floats, multiplied by the portable kernel, against float64.

Interpreted on a CPU, compiled on a GPU. The weights are those of Fp4Weight.dequantize, which are
those of compressed-tensors (tests/formats/test_made_by.py).
"""

from dataclasses import replace

import pytest
import torch

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.weights import merge
from formats.scheme import Scheme
from qkernels import ops
from qkernels.gpu.workspace import workspace
from qkernels.wna16 import gemm
from qkernels.wna16.triton_config import MAX_FUSED_ROWS, TritonGemmConfig
from tests.qkernels.fp4_case import KINDS, random_fp4
from tests.qkernels.plans import multiply


@pytest.fixture
def check(assert_close, tolerance):
    """Compare one product with float64 on the exact weights."""

    def run(weight, x, bias=None, tile=None):
        prepared = ops.prepare_weight(weight, x.dtype, kernel="w4a16")
        got = multiply(x, prepared, bias, tile=tile)
        weight_NK = weight.dequantize(torch.float64)
        want = x.double() @ weight_NK.t()
        magnitude = x.double().abs() @ weight_NK.abs().t()
        if bias is not None:
            want, magnitude = want + bias.double(), magnitude + bias.double().abs()
        assert got.dtype == x.dtype
        assert_close(weight.spec.type, want, got, tolerance(x.dtype))
        bound = torch.finfo(x.dtype).eps * want.abs() + 2**-18 * magnitude
        assert ((got.double() - want).abs() <= bound).all(), "an element is off"
        return got

    return run


def random_x(M, K, dtype, device):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(device, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [1, 17, 300])
def test_numbers_of_rows(check, device, half, poison, M, kind):
    check(random_fp4(kind, 64, 256).to(device), random_x(M, 256, half, device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [16, 32, 96, 144, 480, 576, 2880])
def test_inputs_with_partial_k_step(check, device, half, poison, K, kind):
    if kind == "mxfp4" and K % 32:
        K += 16
    check(random_fp4(kind, 72, K).to(device), random_x(3, K, half, device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [8, 72, 1000])
def test_padded_outputs_are_not_written(check, device, half, poison, N, kind):
    bias = torch.randn(N).to(device, half)
    check(random_fp4(kind, N, 256).to(device), random_x(2, 256, half, device), bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [256, 480])
def test_one_hot_rows_read_weights_back(device, half, kind, K):
    """One-hot rows read the matrix back: exact, since each sum has one term."""
    weight = random_fp4(kind, 72, K, spread=8).to(device)
    prepared = ops.prepare_weight(weight, half, kernel="w4a16")
    got = multiply(torch.eye(K, dtype=half, device=device), prepared)
    assert torch.equal(got.t(), weight.dequantize(half))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [256, 480])
def test_dequantized_scratch_equals_weight_bitwise(half, poison, device, kind, K):
    weight = random_fp4(kind, 72, K, spread=8).to(device)
    if kind == "nvfp4":  # a divisor's reciprocal is rounded: for NVIDIA's factor they are the bits
        weight = replace(weight, global_scale=None, global_factor=1 / weight.global_scale)
    prepared = ops.prepare_weight(weight, half, kernel="w4a16")
    assert torch.equal(gemm.dequantize(prepared), weight.dequantize(half))


def test_every_number_and_scale(device, half):
    """Each of 16 numbers with each scale of float8, and with exponents far apart in a row."""
    numbers = torch.arange(16).repeat(2)
    row = (numbers[0::2] | numbers[1::2] << 4).to(torch.uint8)
    scales = torch.arange(127).to(torch.uint8)
    weight = Fp4Weight(
        bytes_NB=row[:8].repeat(8, 127),
        scales_NG=torch.stack([scales, scales | 0x80] * 4).view(torch.float8_e4m3fn),
        global_scale=None,
        global_factor=torch.tensor(2.0**-5),
        spec=Scheme.parse("w4a16-nvfp4").weight,
    ).to(device)
    prepared = ops.prepare_weight(weight, half, kernel="w4a16")
    assert torch.equal(gemm.dequantize(prepared), weight.dequantize(half))
    exponents = 127 - torch.arange(24).to(torch.uint8).repeat(8, 1)
    weight = Fp4Weight(
        bytes_NB=row.repeat(8, 24),
        scales_NG=exponents,
        global_scale=None,
        spec=Scheme.parse("w4a16-mxfp4").weight,
    ).to(device)
    prepared = ops.prepare_weight(weight, half, kernel="w4a16")
    got = multiply(torch.eye(768, dtype=half, device=device), prepared)
    assert torch.equal(got.t(), weight.dequantize(half))


def test_many_rows_take_the_scratch_buffer(check, device, half, poison):
    x = random_x(MAX_FUSED_ROWS + 1, 480, half, device)
    check(random_fp4("mxfp4", 64, 480).to(device), x, torch.randn(64).to(device, half))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [2, 5])
def test_split_sums_every_part_once(check, device, half, poison, split, kind):
    weight, bias = random_fp4(kind, 136, 1248).to(device), torch.randn(136).to(device, half)
    tile = TritonGemmConfig(block_m=16, block_n=64, split=split, warps=4, stages=3)
    partials, counters = workspace(device)
    x = random_x(9, 1248, half, device)
    partials.fill_(float("nan"))
    first = check(weight, x, bias, tile)
    assert not counters.any(), "the kernel must leave its counters at zero"
    partials.fill_(float("nan"))
    assert torch.equal(first, check(weight, x, bias, tile))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_tma", [False, True])
def test_block_over_two_stored_tiles(check, device, half, poison, use_tma, kind):
    tile = TritonGemmConfig(block_m=32, block_n=128, split=1, warps=8, use_tma=use_tma)
    check(random_fp4(kind, 248, 480).to(device), random_x(40, 480, half, device), tile=tile)


def test_merged_weights_keep_their_own_global_scales(check, device, half, poison):
    parts = [random_fp4("nvfp4", n, 256, std=std) for n, std in ((72, 0.02), (8, 1.0))]
    check(merge(parts).to(device), random_x(3, 256, half, device))
