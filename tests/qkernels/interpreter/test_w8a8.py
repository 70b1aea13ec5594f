"""Rounding of inputs and 8-bit products: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch

from formats.in_memory.fp4 import is_fp4
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.numerics.activation import quantize_input
from formats.scheme import FIXED_SCHEMES, ActivationSpec, Scheme
from qkernels import ops, reference
from qkernels.gpu.workspace import workspace
from qkernels.operands.codes import InputRounding
from qkernels.w8a8 import triton_gemm as w8a8
from qkernels.w8a8.config import W8A8TritonConfig

ACTIVATIONS = {
    "int8": ActivationSpec(),
    "int8 static": ActivationSpec(dynamic=False, per="tensor"),
    "float8": ActivationSpec(type="float"),
    "float8 static": ActivationSpec(type="float", dynamic=False, per="tensor"),
}
PRODUCTS = ("w8a8", "w8a8-static", "w8a8-fp8", "w8a8-fp8-static")
GROUPS = {
    "float8 groups": ActivationSpec(type="float", per="group"),
    "int8 groups of 32": ActivationSpec(per="group", group_size=32),
}


def same_bits(left, right):
    return torch.equal(left.cpu().view(torch.uint8), right.cpu().view(torch.uint8))


def random_x(M, K, dtype, device, spread=0.0):
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    return (x * 2 ** (torch.rand(M, 1, generator=generator) * spread)).to(device, dtype)


def int8_weight(codes_NK, scales_N1, device):
    """A w8a8 weight of these signed codes."""
    packed = PackedWeight.from_codes(
        (codes_NK.to(torch.int16) + 128).to(torch.uint8),
        scales_N1,
        None,
        Scheme.parse("w8a8").weight,
    )
    return with_activation(packed, Scheme.parse("w8a8"), None).to(device)


def rounded_weight(name, N, K, device):
    scheme = Scheme.parse(name)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K))
    scale = 0.03 if "static" in name else None
    return with_activation(round_to_nearest(weight, scheme.weight), scheme, scale).to(device)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("M, K", [(1, 32), (5, 200), (3, 1000), (2, 4096)])
def test_rounding_equals_reference_bitwise(device, dtype, poison, name, M, K):
    """Against the CPU: torch divides by a constant less exactly on a GPU."""
    activation = ACTIVATIONS[name]
    x = random_x(M, K, dtype, device, spread=12 if activation.dynamic else 4)
    x[0, 0] = 0
    x[-1, 1] *= 50  # the largest number of a row may be in any chunk
    scale = None if activation.dynamic else torch.tensor(0.0123)
    got = ops.quantize_input(
        x, activation, None if scale is None else scale.to(device), kernel="triton"
    )
    want = quantize_input(x.cpu(), activation, scale)
    assert same_bits(got[0], want[0]) and torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("M, K", [(1, 256), (3, 1280), (5, 4096)])
def test_group_rounding_equals_reference_bitwise(device, dtype, poison, name, M, K):
    x = random_x(M, 2 * K, dtype, device, spread=8)[:, :K]
    x *= 2 ** torch.arange(K, device=device).div(64).remainder(7).to(dtype)
    x[0, :256] = 0
    got = ops.quantize_input(x, GROUPS[name], kernel="triton")
    want = quantize_input(x.cpu(), GROUPS[name], None)
    assert same_bits(got[0], want[0]) and torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_rounding_of_ties_zeros_and_nan(device, dtype, name):
    x = torch.zeros(4, 64, dtype=dtype, device=device)
    x[0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127.0])
    x[1, 3] = float("nan")
    x[3] = torch.arange(64) - 31.5
    codes, scales = ops.quantize_input(x, ACTIVATIONS[name], kernel="triton")
    want_codes, want_scales = quantize_input(x.cpu(), ACTIVATIONS[name], None)
    rows = [0, 2, 3]
    # as bytes: not every torch indexes float8
    codes, want_codes = codes.view(torch.uint8), want_codes.view(torch.uint8)
    assert torch.equal(codes[rows].cpu(), want_codes[rows])
    assert torch.equal(scales[rows].cpu(), want_scales[rows])
    assert scales[1].isnan(), "a NaN must reach the output"


def test_rounding_reads_rows_of_any_stride(device, dtype):
    x = random_x(6, 128, dtype, device)
    for view in (x[:, ::2], x[::2, :64], x.t()):
        got = ops.quantize_input(view, ACTIVATIONS["int8"], kernel="triton")
        want = quantize_input(view.cpu(), ACTIVATIONS["int8"], None)
        assert same_bits(got[0], want[0]) and torch.equal(got[1].cpu(), want[1])
    assert ops.quantize_input(x[:0], ACTIVATIONS["int8"], kernel="triton")[0].shape == (0, 128)


TILES = {
    "one part": W8A8TritonConfig(block_m=16, block_n=64),
    "3 parts": W8A8TritonConfig(block_m=16, block_n=64, split=3),
    "8 parts": W8A8TritonConfig(block_m=32, block_n=128, block_k=64, split=8),
    "x left": W8A8TritonConfig(block_m=128, block_n=64, weight_is_a=False, pdl=False),
    "x left, 2 parts": W8A8TritonConfig(
        block_m=64, block_n=128, split=2, weight_is_a=False, group_m=2
    ),
    "without TMA, 3 parts": W8A8TritonConfig(
        block_m=16, block_n=64, block_k=64, split=3, use_tma=False
    ),
    "without TMA, x left": W8A8TritonConfig(
        block_m=64, block_n=128, weight_is_a=False, use_tma=False
    ),
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("M, N, K", [(1, 8, 32), (3, 24, 96), (17, 64, 1056), (63, 200, 544)])
def test_integer_sums_are_exact(device, poison, tile, M, N, K):
    """With scales of 1 and float32 results only the last conversion of the sum rounds."""
    generator = torch.Generator().manual_seed(M)
    codes_MK = torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=generator)
    codes_NK = torch.randint(-128, 128, (N, K), dtype=torch.int8, generator=generator)
    codes_MK[0], codes_NK[0] = -128, -128  # the largest sum there is
    codes_NK[-1] = 127
    weight = ops.prepare_weight(
        int8_weight(codes_NK, torch.ones(N, 1), device), torch.float32, kernel="triton_w8a8"
    )
    partials, counters = workspace(device)
    partials.fill_(float("nan"))
    got = w8a8.linear_codes(
        codes_MK.to(device), torch.ones(M, 1, device=device), weight, config=TILES[tile]
    )
    want = (codes_MK.long() @ codes_NK.long().t()).float()
    assert torch.equal(got.cpu(), want)
    assert not counters.any(), "the kernel must leave its counters at zero"


@pytest.mark.parametrize("M", [1, 3, 17, 63, 118, 257])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_equals_reference(assert_close, device, dtype, poison, name, M):
    """Odd rows; outputs and inputs that fill no tile; bias; scales spread over rows."""
    N, K = (72, 416) if M > 63 else (200, 1056)
    packed = rounded_weight(name, N, K, device)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x = random_x(M, K, dtype, device, spread=3)
    got = ops.linear(x, ops.prepare_weight(packed, dtype, kernel="triton_w8a8"), bias)
    codes, scales = quantize_input(x.cpu(), packed.activation, packed.to("cpu").input_scale)
    want = (codes.double() * scales.double()) @ packed.to("cpu").dequantize(torch.float64).t()
    want = want + bias.cpu().double()
    assert got.dtype == dtype
    # one rounding to the output's dtype; a tensor core keeps 14 bits of a float8 sum of 128
    allowed = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 2e-6}[dtype]
    float8_allowed = 1e-5 if device.type == "cpu" else 1e-3
    assert_close(name, want, got, max(allowed, float8_allowed if "fp8" in name else 0))


@pytest.mark.parametrize("split", [2, 3, 8])
@pytest.mark.parametrize("name", ["w8a8", "w8a8-fp8"])
def test_splits_are_summed_once_and_in_order(device, half, poison, name, split):
    packed = rounded_weight(name, 136, 9 * 128, device)
    weight = ops.prepare_weight(packed, half, kernel="triton_w8a8")
    codes, scales = ops.quantize_input(random_x(19, 9 * 128, half, device), packed.activation)
    scales = scales.contiguous()
    tile = W8A8TritonConfig(block_m=32, block_n=64, split=split)
    one = W8A8TritonConfig(block_m=32, block_n=64)
    whole = w8a8.linear_codes(codes, scales, weight, config=one)
    first = w8a8.linear_codes(codes, scales, weight, config=tile)
    assert torch.equal(first, w8a8.linear_codes(codes, scales, weight, config=tile))
    if name == "w8a8":
        assert torch.equal(first, whole)
    torch.testing.assert_close(first, whole, rtol=1e-2, atol=1e-2)


def test_strided_and_batched_x(device, half):
    packed = rounded_weight("w8a8", 64, 64, device)
    weight = ops.prepare_weight(packed, half, kernel="triton_w8a8")
    x = random_x(6, 128, half, device)
    dense = ops.linear(x[:, ::2].contiguous(), weight)
    assert torch.equal(ops.linear(x[:, ::2], weight), dense)
    assert torch.equal(ops.linear(x[:, ::2].reshape(2, 3, 64), weight), dense.view(2, 3, 64))
    assert ops.linear(x[:0, ::2], weight).shape == (0, 64)


def test_nan_in_x_affects_only_its_row(device, half):
    weight = ops.prepare_weight(rounded_weight("w8a8", 64, 64, device), half, kernel="triton_w8a8")
    x = random_x(3, 64, half, device)
    x[1, 5] = float("nan")
    y = ops.linear(x, weight)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def block_weight(N, K, device):
    """Scales of blocks, and of inputs by random_x, that differ by powers of two."""
    scheme = Scheme.parse("w8a8-fp8-block")
    generator = torch.Generator().manual_seed(N + K)
    weight = torch.randn(N, K, generator=generator)
    weight *= 2 ** (torch.arange(N) // 128 % 5)[:, None] * 2 ** (torch.arange(K) // 128 % 3)
    return with_activation(round_to_nearest(weight, scheme.weight), scheme, None).to(device)


@pytest.mark.parametrize("M, N, K", [(1, 8, 128), (17, 200, 640), (65, 136, 384), (130, 136, 256)])
def test_float8_block_scales_equal_reference(assert_close, device, dtype, poison, M, N, K):
    packed = block_weight(N, K, device)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x = random_x(M, K, dtype, device, spread=3)
    x *= 2 ** (torch.arange(K, device=device) // 128 % 4).to(dtype)
    got = ops.linear(x, ops.prepare_weight(packed, dtype, kernel="triton_w8a8"), bias)
    codes, scales = quantize_input(x.cpu(), packed.activation, None)
    x_rounded = (codes.double().unflatten(1, (-1, 128)) * scales.double()[..., None]).flatten(1)
    want = x_rounded @ packed.to("cpu").dequantize(torch.float64).t() + bias.cpu().double()
    allowed = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 2e-6}[dtype]
    assert_close("blocks", want, got, max(allowed, 1e-5 if device.type == "cpu" else 1e-3))


def test_float8_weight_with_one_scale_for_all(device, half):
    packed = rounded_weight("w8a8-fp8-static", 64, 96, device)
    assert isinstance(packed, Fp8Weight) and packed.scales_RC.numel() == 1
    weight = ops.prepare_weight(packed, half, kernel="triton_w8a8")
    assert weight.tensors["scales"].shape == (64,)


@pytest.mark.parametrize("name", PRODUCTS)
def test_precomputed_codes_are_accepted(device, half, name):
    packed = rounded_weight(name, 64, 96, device)
    x = random_x(5, 96, half, device)
    for kernel in ("triton_w8a8", "reference"):
        weight = ops.prepare_weight(packed, half, kernel=kernel)
        rounding = "triton" if kernel == "triton_w8a8" else "reference"
        codes, scales = ops.quantize_input(x, packed.activation, packed.input_scale, rounding)
        assert torch.equal(ops.linear_codes(codes, scales, weight), ops.linear(x, weight))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("M, C", [(1, 64), (5, 200), (3, 1536), (2, 4160)])
@pytest.mark.parametrize("op", ["norm", "norm of a sum", "silu"])
def test_fused_operation_equals_separate_operations(device, dtype, poison, op, name, M, C):
    activation = ACTIVATIONS[name]
    scale = None if activation.dynamic else torch.tensor(0.05, device=device)
    form = InputRounding(activation, scale)
    x = random_x(M, 2 * C if op == "silu" else C, dtype, device, spread=4)
    x[-1, 1] = 60  # the largest of a row may be in any chunk
    if op == "silu":
        inputs = x, ops.ActSpec(kind="silu"), form
        codes, scales = ops.activate(*inputs, kernel="triton")
        want_codes, want_scales = reference.activate(*inputs)
    else:
        residual = random_x(M, C, dtype, device) * 3 if op == "norm of a sum" else None
        spec = ops.NormSpec(weight_C=random_x(1, C, dtype, device)[0], eps=1e-5)
        (codes, scales), total = ops.norm(x, residual, spec, form, kernel="triton")
        (want_codes, want_scales), want_total = reference.norm(x, residual, spec, form)
        assert torch.equal(total, want_total)
    # another order of the sum of squares, or another exp, may move a value by one rounding
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(scales, want_scales, rtol=max(4 * eps, 1e-5), atol=0)
    got, want = codes.float() * scales, want_codes.float() * want_scales
    step = scales if activation.type == "int" else want.abs() / 8 + scales * 2**-9
    assert ((got - want).abs() <= step * 1.001 + 4 * eps * want.abs()).all()
    same = ((scales / want_scales - 1).abs() < 1e-5).flatten()
    assert same.any() and (codes.float() != want_codes.float())[same].float().mean() < 0.02


def test_every_fixed_scheme_has_a_gpu_kernel():
    """The one that has none yet: float8 weights alone. 4-bit numbers become 8-bit codes before."""
    from qkernels.operations import explain

    taken = {}
    for name, scheme in FIXED_SCHEMES.items():
        if is_fp4(scheme.weight):
            continue
        rows = explain(
            "linear",
            device="cuda",
            dtype=torch.bfloat16,
            spec=scheme.weight,
            activation=scheme.activation,
            out_features=256,
            in_features=256,
        )
        taken[name] = next(row.name for row in rows if row.taken)
    assert {name for name, row in taken.items() if row == "reference"} == {"w8a16-fp8"}
