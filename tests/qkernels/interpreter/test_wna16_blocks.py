"""Weights in blocks of a GGUF file, multiplied by the portable kernel, against float64.

Interpreted on a CPU, compiled on a GPU. A kernel's weights are those of gguf-py, rounded once.
"""

import pytest
import torch

from formats.in_memory.k_weight import KWeight
from formats.scheme import BLOCK_TYPES, block_scheme
from qkernels import ops
from qkernels.gpu.workspace import workspace
from qkernels.wna16 import gemm
from qkernels.wna16.layout import kernel_bits
from qkernels.wna16.triton_config import MAX_FUSED_ROWS, TritonGemmConfig
from tests.qkernels.plans import multiply

FLOATS = {"q6_k": (208,), "q2_k": (80, 82), "q3_k": (108,), "iq4_xs": (0,)}  # bytes of d and dmin


def kernel_of(weight):
    return f"w{kernel_bits(weight.spec.bits)}a16"


@pytest.fixture
def make_blocks(device):
    """make_blocks(type, N, K): random codes, scales and minima, with d and dmin of any sign."""

    def make(kind, N, K, std=0.02):
        generator = torch.Generator().manual_seed(N + K)
        weight = KWeight.random((N, K), block_scheme(kind).weight, std, generator)
        blocks = weight.bytes_NX.reshape(-1, weight.kind.num_bytes)
        for at in FLOATS.get(kind, (0, 2)):  # another d for each block
            floats = blocks[:, at : at + 2].contiguous().view(torch.float16)
            factors = 2 ** (6 * torch.rand(len(blocks), 1, generator=generator) - 3)
            factors *= torch.randint(0, 2, (len(blocks), 1), generator=generator) * 2 - 1
            blocks[:, at : at + 2] = (floats * factors).half().view(torch.uint8)
        return weight.to(device)

    return make


@pytest.fixture
def check(assert_close, tolerance):
    """Compare one product with float64 on the same weights, rounded to x's dtype."""

    def run(weight, x, bias=None, tile=None):
        prepared = ops.prepare_weight(weight, x.dtype, kernel=kernel_of(weight))
        got = multiply(x, prepared, bias, tile=tile)
        weight_NK = weight.dequantize(x.dtype).double()
        want = x.double() @ weight_NK.t()
        magnitude = x.double().abs() @ weight_NK.abs().t()
        if bias is not None:
            want, magnitude = want + bias.double(), magnitude + bias.double().abs()
        assert got.dtype == x.dtype
        assert_close(weight.spec.type, want, got, tolerance(x.dtype))
        bound = torch.finfo(x.dtype).eps * want.abs() + 2**-14 * magnitude
        assert ((got.double() - want).abs() <= bound).all(), "an element is off"
        return got

    return run


def random_x(M, K, dtype, device):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(device, dtype)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("M", [1, 17, 300])
def test_numbers_of_rows(check, make_blocks, device, half, poison, M, kind):
    check(make_blocks(kind, 64, 256), random_x(M, 256, half, device))


@pytest.mark.parametrize("kind", ["q4_1", "q5_1"])
@pytest.mark.parametrize("K", [32, 96, 576])
def test_inputs_with_partial_k_step(check, make_blocks, device, half, poison, K, kind):
    check(make_blocks(kind, 72, K), random_x(3, K, half, device))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("N", [8, 72, 1000])
def test_padded_outputs_are_not_written(check, make_blocks, device, half, poison, N, kind):
    bias = torch.randn(N).to(device, half)
    check(make_blocks(kind, N, 256), random_x(2, 256, half, device), bias)


@pytest.mark.parametrize("inputs", [(0, 256), (256, 512), (128, 640), (64, 704), (96, 480)])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_shards_of_blocks(check, make_blocks, device, half, poison, kind, inputs):
    """A tensor-parallel shard may begin and end inside a block."""
    shard = make_blocks(kind, 64, 768).take_inputs(*inputs)
    check(shard, random_x(3, shard.in_features, half, device))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_one_hot_rows_read_weights_back(make_blocks, device, half, kind):
    """One-hot rows read the matrix back: exact, since each sum has one term."""
    weight = make_blocks(kind, 72, 256)
    prepared = ops.prepare_weight(weight, half, kernel=kernel_of(weight))
    got = multiply(torch.eye(256, dtype=half, device=device), prepared)
    assert torch.equal(got.t(), weight.dequantize(half))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_dequantized_scratch_equals_gguf_py_bitwise(make_blocks, half, poison, kind):
    weight = make_blocks(kind, 72, 512)
    prepared = ops.prepare_weight(weight, half, kernel=kernel_of(weight))
    assert torch.equal(gemm.dequantize(prepared), weight.dequantize(half))


def test_many_rows_take_the_scratch_buffer(check, make_blocks, device, half, poison):
    x = random_x(MAX_FUSED_ROWS + 1, 256, half, device)
    check(make_blocks("q4_k", 64, 256), x, torch.randn(64).to(device, half))


@pytest.mark.parametrize("split", [2, 5])
def test_split_sums_every_part_once(check, make_blocks, device, half, poison, split):
    """10 steps, of which two share d and dmin; a split begins inside a block of 256."""
    weight, bias = make_blocks("q4_k", 136, 1280), torch.randn(136).to(device, half)
    tile = TritonGemmConfig(block_m=16, block_n=64, split=split, warps=4, stages=3)
    partials, counters = workspace(device)
    x = random_x(9, 1280, half, device)
    partials.fill_(float("nan"))
    first = check(weight, x, bias, tile)
    assert not counters.any(), "the kernel must leave its counters at zero"
    partials.fill_(float("nan"))
    assert torch.equal(first, check(weight, x, bias, tile))


@pytest.mark.parametrize("use_tma", [False, True])
def test_block_over_two_stored_tiles(check, make_blocks, device, half, poison, use_tma):
    tile = TritonGemmConfig(block_m=32, block_n=128, split=1, warps=8, use_tma=use_tma)
    check(make_blocks("q4_k", 256, 512), random_x(40, 512, half, device), tile=tile)
    check(make_blocks("q6_k", 248, 512), random_x(40, 512, half, device), tile=tile)


def test_groups_without_a_step_are_constant(check, make_blocks, device, half):
    """A scale 0 leaves the minimum: llama.cpp writes such groups."""
    weight = make_blocks("q4_k", 64, 256)
    blocks = weight.bytes_NX.reshape(-1, 144)
    blocks[:, 4:8] &= 0xC0  # the first four groups have scale 0
    assert len(weight.dequantize()[0, :32].unique()) == 1
    check(weight, random_x(4, 256, half, device))
