"""8-bit activations in plain torch: exact integer sums, the rounding of inputs, every weight."""

import pytest
import torch

from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import merge, round_to_nearest, with_activation
from formats.numerics.activation import quantize_input
from formats.scheme import FIXED_SCHEMES, ActivationSpec, Scheme
from qkernels import QuantLinear, explain, ops
from qkernels.errors import KernelError
from qkernels.linear import reference as linear_reference

INT8 = ActivationSpec()


@pytest.mark.parametrize("K", [1, 1023, 1024, 5000])
def test_integer_sums_are_exact(K):
    """Extreme odd codes: the sum 5000 * 127 * 127 is far beyond what float32 counts."""
    a = torch.full((3, K), -127, dtype=torch.int8)
    b = torch.full((5, K), -127, dtype=torch.int8)
    b[2] = -128
    b[1] = torch.randint(-128, 128, (K,), generator=torch.Generator().manual_seed(K))
    want = a.long() @ b.long().t()
    assert torch.equal(linear_reference.int8_matmul(a, b).long(), want)


def test_dynamic_rounding_of_inputs():
    x = torch.tensor([[1.27, -0.635, 0.01, 0.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, -6.35, 1.0]])
    codes, scales = quantize_input(x, INT8, None)
    assert codes.tolist() == [[127, -64, 1, 0], [0, 0, 0, 0], [60, 0, -127, 20]]
    torch.testing.assert_close(scales[[0, 2], 0], torch.tensor([0.01, 0.05]))


def test_static_rounding_of_inputs_saturates():
    spec = ActivationSpec(dynamic=False, per="tensor")
    codes, scales = quantize_input(torch.tensor([[9.0, -9.0, 0.26]]), spec, torch.tensor(0.05))
    assert codes.tolist() == [[127, -128, 5]] and float(scales) == pytest.approx(0.05)


def test_groups_of_inputs_have_their_own_scale():
    spec = ActivationSpec(type="float", per="group", group_size=4)
    x = torch.tensor([[448.0, 1.0, 0.0, 0.0, 4.48, 0.01, 0.0, 0.0, 2.0]])
    codes, scales = quantize_input(x, spec, None)
    torch.testing.assert_close(scales, torch.tensor([[1.0, 0.01, 2 / 448]]))
    assert codes.shape == (1, 12)
    assert codes.float()[0, [0, 4, 8]].tolist() == [448.0, 448.0, 448.0]


@pytest.mark.parametrize("name", FIXED_SCHEMES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_linear_equals_product_of_rounded_input_and_weight(assert_close, name, kind):
    scheme = Scheme.parse(name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(192, 320, generator=generator)
    scale = 0.02 if "static" in name else None
    packed = with_activation(round_to_nearest(weight, scheme.weight), scheme, scale)
    x = torch.randn(2, 3, 320, generator=generator).to(kind)
    bias = torch.randn(192, generator=generator).to(kind)
    prepared = ops.prepare_weight(packed, kind, kernel="reference")
    rounded = x.double()
    if scheme.activation is not None:
        codes, scales = quantize_input(x.reshape(6, 320), scheme.activation, packed.input_scale)
        groups = codes.double().unflatten(1, (scales.shape[1], -1)) * scales.double()[..., None]
        rounded = groups.flatten(1)[:, :320].reshape(2, 3, 320)
    want = rounded @ packed.dequantize(torch.float64).t() + bias.double()
    got = ops.linear(x, prepared, bias)
    assert got.dtype == kind and got.shape == (2, 3, 192)
    assert_close(name, want, got, 1e-5 if kind == torch.float32 else 1e-2)


def test_input_order_is_undone_for_every_kernel():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    spec = Scheme.parse("w4a16-sym-g32").weight
    plain = PackedWeight.from_float(weight[:, order], spec)
    from dataclasses import replace

    ordered = replace(plain, input_order=order)
    x = torch.randn(5, 96)
    want = x @ ordered.dequantize().t()
    for kernel in ("dense", "reference"):
        prepared = ops.prepare_weight(ordered, torch.float32, kernel=kernel)
        torch.testing.assert_close(ops.linear(x, prepared), want)
    layer = QuantLinear.from_packed(ordered)
    torch.testing.assert_close(layer(x), want)
    again = QuantLinear(96, 64, "w4a16-sym-g32")
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    assert torch.equal(again.dequantize(), ordered.dequantize())  # sorted inside groups


def test_merged_fp8_weights_keep_their_scales():
    parts = [torch.randn(n, 256) * (i + 1) for i, n in enumerate((64, 200, 128))]
    for name in ("w8a8-fp8", "w8a8-fp8-static", "w8a8-fp8-block"):
        scheme = Scheme.parse(name)
        scale = 0.5 if "static" in name else None
        rounded = [
            with_activation(Fp8Weight.from_float(p, scheme.weight), scheme, scale) for p in parts
        ]
        merged = merge(rounded)
        merged.check()
        assert torch.equal(merged.dequantize(), torch.cat([r.dequantize() for r in rounded]))


def test_quant_linear_stores_w8a8_and_refuses_what_gptq_cannot():
    linear = torch.nn.Linear(96, 64)
    layer = QuantLinear.from_float(linear, "w8a8")
    assert (layer.state_dict()["qzeros"] == 0x7F7F7F7F).all()
    layer(torch.ones(2, 96))
    assert str(layer.packed().scheme) == "w8a8"
    with pytest.raises(ValueError, match="floating point"):
        QuantLinear.from_float(linear, "w8a8-fp8")
    weight = with_activation(
        Fp8Weight.from_float(linear.weight.detach(), FIXED_SCHEMES["w8a8-fp8"].weight),
        FIXED_SCHEMES["w8a8-fp8"],
        None,
    )
    layer = QuantLinear.for_inference(weight, linear.bias, torch.float32)
    torch.testing.assert_close(
        layer(torch.ones(2, 96)), linear(torch.ones(2, 96)), atol=0.1, rtol=0.1
    )
    with pytest.raises(KernelError, match="released"):
        layer.state_dict()


def test_weight_only_rows_give_refusal_reason():
    explanation = explain(
        "linear",
        device="cpu",
        dtype=torch.float32,
        spec=FIXED_SCHEMES["w8a8"].weight,
        activation=INT8,
        out_features=64,
        in_features=64,
    )
    assert next(c for c in explanation if c.name == "dense").reason.startswith(
        "takes 16- or 32-bit"
    )
    assert next(c for c in explanation if c.taken).name in ("cpu_w8a8", "reference")
