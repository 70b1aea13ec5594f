"""The CPU rows of `linear`: torch's packed products and its int8 product, and where they apply."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.numerics.bits import pack
from formats.scheme import BLOCK_TYPES, CHANNEL, ActivationSpec, QuantSpec, Scheme, block_scheme
from qkernels import QuantLinear, dispatch, ops
from qkernels.errors import KernelError
from qkernels.operations import explain
from qkernels.w8a8 import cpu as cpu_w8a8
from qkernels.wna16 import cpu as cpu_wna16
from qkernels.wna16 import rows as wna16_rows
from qkernels.wna16.layout import kernel_bits

packed_products = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in wna16_rows.FAST_CPUS,
    reason="torch has no fast packed products for this CPU",
)
exact_products = pytest.mark.skipif(
    not cpu_w8a8.product_is_exact(), reason="torch's int8 product is not exact on this CPU"
)


def random_weight(N, K, bits, symmetric, group):
    """Signed scales over 2^8, zeros over the whole range, and a row of each extreme code."""
    spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=group)
    generator = torch.Generator().manual_seed(N * K)
    G = spec.num_groups(K)
    codes = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8, generator=generator)
    codes[0], codes[-1] = 0, spec.max_code
    scales = 2 ** (torch.rand(N, G, generator=generator) * 8 - 12)
    scales *= torch.randint(0, 2, (N, G), generator=generator) * 2 - 1
    zeros = torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8)
    if not symmetric:
        zeros = torch.randint(0, 2**bits, (N, G), dtype=torch.uint8, generator=generator)
        zeros[0], zeros[-1] = spec.max_code, 0
    return PackedWeight(
        words_NW=pack(codes, bits),
        scales_NG=scales.half(),
        zeros_NG=zeros,
        spec=spec,
        in_features=K,
    )


@packed_products
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    "N, K, group",
    [(16, 32, 32), (48, 96, 32), (1008, 192, 64), (64, 384, 128), (80, 256, 256), (32, 128, -1)],
)
def test_4_bit_products(N, K, group, symmetric, assert_close):
    packed = random_weight(N, K, 4, symmetric, group)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    assert weight.kernel == "cpu_w4a16"
    assert weight.nbytes <= N * K // 2 + 4 * N * packed.scales_NG.shape[1]
    check_product(packed, weight, assert_close)


@packed_products
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 32), (3, -1), (6, -1)])
def test_products_of_other_bits(bits, group, symmetric, assert_close):
    packed = random_weight(48, 192 if group > 0 else 256, bits, symmetric, group)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    is_packed = bits < 4 or symmetric  # torch multiplies only symmetric 8-bit codes
    assert weight.kernel == (f"cpu_w{kernel_bits(bits)}a16" if is_packed else "dense")
    check_product(packed, weight, assert_close)


@packed_products
@pytest.mark.parametrize("kind", ["q4_k", "q4_1"])
@pytest.mark.parametrize("inputs", [(0, 1024), (96, 800)])
def test_4_bit_blocks_of_a_gguf_file_stay_packed(kind, inputs, assert_close):
    """Scales and minima are rounded to bfloat16, a weight by 2^-8 of the largest of its group."""
    generator = torch.Generator().manual_seed(5)
    spec = block_scheme(kind).weight
    weight = KWeight.random((48, 1024), spec, 0.02, generator).take_inputs(*inputs)
    prepared = ops.prepare_weight(weight, torch.bfloat16)
    assert prepared.kernel == "cpu_w4a16" and prepared.nbytes <= 5 * weight.in_features * 48 / 8
    weight_NK = weight.dequantize()
    groups_NGL = (cpu_wna16.dequantize(prepared).float() - weight_NK).unflatten(1, (-1, 32))
    largest_NG1 = weight_NK.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert (groups_NGL.abs() <= 2**-7 * largest_NG1).all()
    x = torch.randn(5, weight.in_features, generator=generator).bfloat16()
    assert_close(kind, x.double() @ weight_NK.double().t(), ops.linear(x, prepared), 5e-3)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("kernel", ["dense", "reference", "fixed_order"])
def test_gguf_blocks_run_as_floats(kind, kernel, assert_close):
    generator = torch.Generator().manual_seed(6)
    spec = block_scheme(kind).weight
    weight = KWeight.random((24, 768), spec, 0.02, generator).take_inputs(128, 608)
    x = torch.randn(3, 480, generator=generator)
    prepared = ops.prepare_weight(weight, torch.float32, kernel=kernel)
    want = x.double() @ weight.dequantize().double().t()
    assert_close(kernel, want, ops.linear(x, prepared), 1e-6)


@pytest.mark.parametrize(("bits", "kernel"), [(2, "w4a16"), (3, "w4a16"), (6, "w8a16")])
def test_every_bit_width_has_a_gpu_kernel(bits, kernel):
    spec = QuantSpec(bits=bits, symmetric=True, group_size=128)
    shape = {"out_features": 64, "in_features": 512, "dtype": torch.bfloat16, "device": "cuda"}
    text = str(explain("linear", spec=spec, **shape))
    assert f"-> {kernel}: supported" in text, text


def test_gpu_rows_name_block_types():
    shape = {"out_features": 64, "in_features": 512, "dtype": torch.bfloat16, "device": "cuda"}
    for kind in BLOCK_TYPES:
        text = str(explain("linear", spec=block_scheme(kind).weight, **shape))
        bits = kernel_bits(block_scheme(kind).weight.bits)
        assert f"-> w{bits}a16: supported" in text, text
        assert "sm90_large_m: takes one scale for each K step, not one for" in text


@pytest.mark.parametrize("N, K", [(8, 48), (24, 112), (1000, 96), (64, 528)])
def test_8_bit_products(N, K, assert_close):
    spec = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)
    generator = torch.Generator().manual_seed(K)
    codes = torch.randint(0, 256, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.randn(N, 1, generator=generator) / 64
    packed = PackedWeight.from_codes(codes, scales, None, spec)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    assert weight.kernel == "cpu_w8a16"
    check_product(packed, weight, assert_close)


def check_product(packed, weight, assert_close):
    """Against float64, whole and by element, at odd numbers of rows and with strides."""
    torch.manual_seed(0)
    N, K = packed.out_features, packed.in_features
    weight_NK = packed.dequantize(torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    bias = torch.randn(N).bfloat16()
    for M in (0, 1, 3, 17, 118):
        x = torch.randn(M, 2 * K)[:, ::2].bfloat16()
        want = x.double() @ weight_NK.t()
        magnitude = x.double().abs() @ weight_NK.abs().t()
        for got, expected in (
            (ops.linear(x, weight), want),
            (ops.linear(x.view(M, 1, K), weight, bias)[:, 0], want + bias.double()),
        ):
            assert got.dtype == torch.bfloat16
            if M:
                # a scale and a result are rounded by up to 2^-9 each: few outputs may add up
                assert_close(f"M={M}", expected, got, 4e-3 if N >= 48 else 6e-3)
            bound = eps * (expected.abs() + magnitude + bias.double().abs())
            assert ((got.double() - expected).abs() <= bound).all(), "an element is off"


@packed_products
@pytest.mark.parametrize("scheme", ["w4a16-asym-g32", "w8a16-sym-channel"])
def test_gradient_of_x(scheme):
    spec = {
        "w4a16-asym-g32": QuantSpec(bits=4, symmetric=False, group_size=32),
        "w8a16-sym-channel": QuantSpec(bits=8, symmetric=True, group_size=CHANNEL),
    }[scheme]
    packed = round_to_nearest(torch.randn(48, 96), spec)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    assert weight.kernel.startswith("cpu_")
    x = torch.randn(5, 96).bfloat16().requires_grad_()
    grad = torch.randn(5, 48).bfloat16()
    ops.linear(x, weight).backward(grad)
    want = grad.double() @ packed.dequantize(torch.float64)
    assert (x.grad.double() - want).norm() < 1e-2 * want.norm()


@packed_products
def test_code_at_zero_point_dequantizes_to_zero():
    """The zero is computed from the rounded scale; from the exact one a rest would stay."""
    zeros = torch.tensor([0, 4, 6, 7, 8, 9, 10, 12] * 2, dtype=torch.uint8)[:, None]
    scales = torch.linspace(0.01, 0.02, 16)[:, None]
    spec = QuantSpec(bits=4, symmetric=False, group_size=32)
    packed = PackedWeight.from_codes(zeros.expand(16, 32), scales, zeros, spec)
    weight = ops.prepare_weight(packed, torch.bfloat16)
    assert weight.kernel == "cpu_w4a16"
    assert not ops.linear(torch.ones(2, 32).bfloat16(), weight).any()


@packed_products
def test_permuted_inputs():
    packed = random_weight(32, 64, 4, True, 32)
    order = torch.randperm(64)
    weight = ops.prepare_weight(replace(packed, input_order=order), torch.bfloat16)
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    plain = ops.prepare_weight(packed, torch.bfloat16)
    y, grad = ops.linear(x, weight), torch.randn(3, 32).bfloat16()
    assert torch.equal(y, ops.linear(x[:, order], plain))
    y.backward(grad)
    got, x.grad = x.grad, None
    ops.linear(x[:, order], plain).backward(grad)
    assert torch.equal(got, x.grad), "its gradient is in the model's order, too"


@packed_products
def test_quant_linear_runs_on_cpu_kernel():
    linear = torch.nn.Linear(128, 64)
    layer = QuantLinear.from_float(linear, "w4a16-sym-g32")
    assert layer(torch.ones(2, 128).bfloat16()).dtype == torch.bfloat16
    assert layer._prepared.kernel == "cpu_w4a16"
    assert layer(torch.ones(2, 128)).dtype == torch.float32
    assert layer._prepared.kernel == "dense", "float32 is for exact comparisons"


def problem(**changes):
    spec = QuantSpec(bits=4, symmetric=True, group_size=32)
    fields = {"device": "cpu", "dtype": torch.bfloat16, "spec": spec}
    return fields | {"out_features": 32, "in_features": 64} | changes


def reason(name, **changes):
    return next(c for c in explain("linear", **problem(**changes)) if c.name == name).reason


@packed_products
def test_packed_rows_give_refusal_reason():
    assert reason("cpu_w4a16") == "supported"
    assert "scalar loop" in reason("cpu_w4a16", dtype=torch.float32)
    assert "scalar loop" in reason("cpu_w4a16", dtype=torch.float16)
    assert "cpu" in reason("cpu_w4a16", device="cuda")
    assert "outputs divisible" in reason("cpu_w4a16", out_features=24)
    assert "groups" in reason("cpu_w4a16", spec=QuantSpec(bits=4, symmetric=True, group_size=16))
    five = QuantSpec(bits=5, symmetric=True, group_size=32)
    assert "of 2 to 4 bits" in reason("cpu_w4a16", spec=five)
    assert "8-bit ones" in reason("cpu_w4a16", activation=ActivationSpec())
    channel = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)
    assert reason("cpu_w8a16", spec=channel) == "supported"
    for spec in (
        QuantSpec(bits=8, symmetric=True, group_size=32),
        QuantSpec(bits=8, symmetric=False, group_size=CHANNEL),
    ):
        assert "one scale for each output" in reason("cpu_w8a16", spec=spec)
    # torch 2.13 would read over the end, and crash
    assert "inputs divisible" in reason("cpu_w8a16", spec=channel, in_features=100)


def test_other_cpu_has_no_packed_kernel(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "not for this CPU" in reason("cpu_w4a16")


@exact_products
@pytest.mark.parametrize("name", ["w8a8", "w8a8-static"])
@pytest.mark.parametrize("N, K", [(8, 32), (24, 100), (1000, 1036)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_products_equal_reference(name, N, K, kind):
    scheme = Scheme.parse(name)
    packed = with_activation(
        round_to_nearest(torch.randn(N, K), scheme.weight),
        scheme,
        0.02 if "static" in name else None,
    )
    weight = ops.prepare_weight(packed, kind)
    plain = ops.prepare_weight(packed, kind, kernel="reference")
    assert (weight.kernel, plain.kernel) == ("cpu_w8a8", "reference")
    bias = torch.randn(N).to(kind)
    for M in (0, 1, 16, 17, 70):
        x = (torch.randn(M, 2 * K) * 3)[:, ::2].to(kind)
        assert torch.equal(ops.linear(x, weight, bias), ops.linear(x, plain, bias))
        codes, scales = ops.quantize_input(x, scheme.activation, packed.input_scale)
        got = ops.linear_codes(codes, scales, weight)
        assert torch.equal(got, ops.linear_codes(codes, scales, plain))


def test_int8_row_gives_refusal_reason(monkeypatch):
    scheme = Scheme.parse("w8a8")
    int8 = {"spec": scheme.weight, "activation": scheme.activation}
    assert "cpu" in reason("cpu_w8a8", **int8, device="cuda")
    assert "rounded" in reason("cpu_w8a8")
    groups = ActivationSpec(per="group")
    assert "scale for each row" in reason("cpu_w8a8", **int8 | {"activation": groups})
    grouped = QuantSpec(bits=8, symmetric=True, group_size=32)
    assert "not groups" in reason("cpu_w8a8", **int8 | {"spec": grouped})
    monkeypatch.setattr(cpu_w8a8, "product_is_exact", lambda: False)
    assert "not exact" in reason("cpu_w8a8", **int8)
    with pytest.raises(KernelError, match="not exact"):
        packed = with_activation(round_to_nearest(torch.randn(16, 32), scheme.weight), scheme, None)
        dispatch.choose.cache_clear()
        ops.prepare_weight(packed, torch.float32, kernel="cpu_w8a8")


@pytest.mark.exhaustive
@exact_products
def test_int8_kernel_is_not_used_without_vnni():
    """oneDNN, limited to AVX2, adds pairs of products in 16 bits."""
    code = (
        "import torch; from qkernels.w8a8 import cpu as cpu_w8a8;"
        "a = torch.full((17, 256), 127, dtype=torch.int8);"
        "b = torch.full((256, 24), 127, dtype=torch.int8);"
        "exact = bool((torch._int_mm(a, b) == 256 * 127 * 127).all());"
        "assert exact or not cpu_w8a8.product_is_exact(); print(exact)"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1000:]
