"""The kernel of W4A16 and W8A16 against float64: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch

from qkernels import ops
from qkernels.gpu.workspace import workspace
from qkernels.wna16 import gemm, prepack
from qkernels.wna16.layout import kernel_bits
from qkernels.wna16.triton_config import MAX_FUSED_ROWS, TritonGemmConfig
from tests.qkernels.plans import multiply

exhaustive = pytest.mark.exhaustive

GROUPS = (32, 64, 128, 256, -1)


@pytest.fixture
def check(assert_close, tolerance):
    """Compare one product with float64 on the same rounded operands, whole and by element."""

    def run(packed, x, bias=None, tile=None):
        weight = ops.prepare_weight(packed, x.dtype, kernel=f"w{kernel_bits(packed.spec.bits)}a16")
        got = multiply(x, weight, bias, tile=tile)
        weight_NK = packed.dequantize(torch.float64)
        want = x.double() @ weight_NK.t()
        magnitude = x.double().abs() @ weight_NK.abs().t()
        if bias is not None:
            want, magnitude = want + bias.double(), magnitude + bias.double().abs()
        assert got.dtype == x.dtype
        assert_close("w4a16", want, got, tolerance(x.dtype))
        eps = torch.finfo(x.dtype).eps
        # above the threshold of the config the weights are rounded too
        scratch = tile is None and x.shape[0] > MAX_FUSED_ROWS
        bound = eps * want.abs() + (eps if scratch else 2**-14) * magnitude
        assert ((got.double() - want).abs() <= bound).all(), "an element is off"
        return got

    return run


def random_x(M, K, dtype, device):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(device, dtype)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_group_length(check, make_weight, device, half, poison, group, symmetric, bits):
    K = 512 if group == 256 else 384
    packed = make_weight(64, K, group, symmetric, bits=bits)
    check(packed, random_x(3, K, half, device))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_other_bit_widths_are_stored_in_4_or_8_bits(
    check, make_weight, device, half, poison, bits, symmetric
):
    packed, x = make_weight(72, 192, 64, symmetric, bits=bits), random_x(3, 192, half, device)
    stored = kernel_bits(bits)
    weight = ops.prepare_weight(packed, half, kernel=f"w{stored}a16")
    assert weight.tensors["packed"].numel() * 32 == 128 * 192 * stored
    assert torch.equal(check(packed, x), check(packed.with_bits(stored), x))
    assert torch.equal(gemm.dequantize(weight), packed.dequantize(half))


@pytest.mark.parametrize("M", [1, 3, 16, 17, 63, 65, 130])
def test_rows_beyond_the_tile_are_not_read_or_written(check, make_weight, device, half, poison, M):
    for bits in (4, 8):
        check(make_weight(64, 128, 128, bits=bits), random_x(M, 128, half, device))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("N", [8, 24, 72, 1000])
def test_padded_outputs_are_not_written(check, make_weight, device, half, poison, N, symmetric):
    bias = torch.randn(N).to(device, half)
    for bits in (4, 8):
        packed = make_weight(N, 64, 32, symmetric, bits=bits)
        check(packed, random_x(2, 64, half, device), bias)


@pytest.mark.parametrize("K", [32, 96, 160, 288])
def test_one_group_of_any_length(check, make_weight, device, half, poison, K):
    check(make_weight(32, K, -1), random_x(5, K, half, device))


def test_group_scales_spread_over_a_factor_of_256(check, make_weight, device, half):
    """A scale taken from the neighbouring group or row is then off by far more than rounding."""
    check(make_weight(96, 1024, 128, spread=8), random_x(4, 1024, half, device))
    check(make_weight(96, 1024, 32, False, spread=8), random_x(4, 1024, half, device))


@pytest.mark.parametrize("bits", [4, 8])
def test_one_hot_rows_read_weights_back(make_weight, device, half, bits):
    """One-hot rows read the matrix back: exact, since each sum has one term."""
    packed = make_weight(72, 128, 64, symmetric=False, bits=bits)
    weight = ops.prepare_weight(packed, half, kernel=f"w{bits}a16")
    got = multiply(torch.eye(128, dtype=half, device=device), weight)
    assert torch.equal(got.t(), packed.dequantize(half))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", GROUPS)
def test_dequantized_scratch_equals_packed_bitwise(make_weight, half, poison, group, symmetric):
    for bits in (4, 8):
        packed = make_weight(72, 256, group, symmetric, bits=bits)
        weight = ops.prepare_weight(packed, half, kernel=f"w{bits}a16")
        assert torch.equal(gemm.dequantize(weight), packed.dequantize(half))


def test_many_rows_take_the_scratch_buffer(check, make_weight, device, half, poison):
    bias = torch.randn(64).to(device, half)
    x = random_x(MAX_FUSED_ROWS + 1, 128, half, device)
    check(make_weight(64, 128, 128), x, bias)


@pytest.mark.parametrize(
    "split", [pytest.param(2, marks=exhaustive), 3, pytest.param(4, marks=exhaustive), 8]
)
def test_split_sums_every_part_once(check, make_weight, device, half, poison, split):
    """9 steps: the parts differ in length, and 8 parts leave some with one step."""
    packed, bias = make_weight(136, 9 * 32, 32, bits=8), torch.randn(136).to(device, half)
    tile = TritonGemmConfig(block_m=16, block_n=64, split=split, warps=4, stages=3)
    partials, counters = workspace(device)
    partials.fill_(float("nan"))
    first = check(packed, random_x(19, 9 * 32, half, device), bias, tile)
    assert not counters.any(), "the kernel must leave its counters at zero"
    partials.fill_(float("nan"))
    assert torch.equal(first, check(packed, random_x(19, 9 * 32, half, device), bias, tile))


@pytest.mark.parametrize("M", [1, 63, 130])
def test_bulk_copy_stops_at_the_last_row(check, make_weight, device, half, poison, M):
    tile = TritonGemmConfig(block_m=64, block_n=64, split=2, use_tma=True)
    check(make_weight(72, 96, 32, False), random_x(M, 96, half, device), tile=tile)


def test_bulk_copy_of_unaligned_x(check, make_weight, device, half):
    """TMA reads from multiples of 16 bytes only."""
    x = random_x(1, 64 * 128 + 1, half, device)[0, 1:].view(64, 128)
    assert x.is_contiguous() and x.data_ptr() % 16
    check(
        make_weight(64, 128, 128),
        x,
        tile=TritonGemmConfig(block_m=64, block_n=64, split=1, use_tma=True),
    )


@pytest.mark.parametrize("split", [1, 2])
def test_block_over_two_stored_tiles(check, make_weight, device, half, poison, split):
    tile = TritonGemmConfig(block_m=32, block_n=128, split=split, warps=8, stages=3)
    check(make_weight(256, 256, 64, False), random_x(40, 256, half, device), tile=tile)
    check(make_weight(248, 256, 128), random_x(40, 256, half, device), tile=tile)


def test_strided_and_batched_x(make_weight, device, half):
    weight = ops.prepare_weight(make_weight(64, 64, 32), half, kernel="w4a16")
    x = random_x(6, 128, half, device)
    dense = ops.linear(x[:, ::2].contiguous(), weight)
    assert torch.equal(ops.linear(x[:, ::2], weight), dense)
    assert torch.equal(ops.linear(x[:, ::2].view(2, 3, 64), weight), dense.view(2, 3, 64))
    column_major = x[:, ::2].contiguous().t().contiguous().t()
    assert torch.equal(ops.linear(column_major, weight), dense)
    assert ops.linear(x[:0, ::2], weight).shape == (0, 64)


def test_gradient_reaches_x(make_weight, device, half):
    packed = make_weight(64, 64, 32)
    weight = ops.prepare_weight(packed, half, kernel="w4a16")
    x = random_x(2, 64, half, device).requires_grad_()
    ops.linear(x, weight).sum().backward()
    want = torch.ones(2, 64, dtype=half, device=device) @ packed.dequantize(half)
    torch.testing.assert_close(x.grad, want)


def test_prepacked_order_golden_words():
    """The literals of qkernels/notes/layouts.md."""
    k = torch.arange(32, dtype=torch.uint8)[None]
    words = prepack.fragment_order(k % 16)[0].tolist()
    assert [w & 0xFFFFFFFF for w in words] == [0x91918080, 0xB3B3A2A2, 0xD5D5C4C4, 0xF7F7E6E6]
    words = prepack.fragment_order(k // 2)[0].tolist()
    assert [w & 0xFFFFFFFF for w in words] == [0xC840C840, 0xD951D951, 0xEA62EA62, 0xFB73FB73]
    words = prepack.byte_order(7 * k)[0].tolist()
    assert [w & 0xFFFFFFFF for w in words[:4]] == [0x3F073800, 0x4D15460E, 0x5B23541C, 0x6931622A]


def test_words_of_one_thread_are_contiguous(make_weight, device, half):
    """Word t of every 32 inputs of a step: 16 bytes where the step is 128."""
    for bits, order in ((4, prepack.fragment_order), (8, prepack.byte_order)):
        packed = make_weight(72, 256, 128, bits=bits)
        weight = ops.prepare_weight(packed, half, kernel=f"w{bits}a16")
        words_NKct = order(packed.codes()).view(72, 2, -1, 4)
        words = weight.tensors["packed"]
        assert words.shape == (2, 2, 64, 4, bits)
        assert torch.equal(words[0, :, 5], words_NKct[5].transpose(1, 2))
        assert torch.equal(words[1, :, 7], words_NKct[71].transpose(1, 2))
