"""QuantLinear of 4-bit floats, on a CPU: it holds and saves what compressed-tensors stores."""

import copy

import pytest
import torch

from formats.codecs import compressed_tensors
from formats.errors import CheckpointError
from formats.in_memory.weights import merge
from formats.scheme import Scheme
from qkernels import QuantLinear, explain, replace_linears
from qkernels.errors import KernelError
from tests.qkernels.fp4_case import KINDS, random_fp4

NAMES = {
    "mxfp4": ["weight_packed", "weight_scale"],
    "nvfp4": ["weight_packed", "weight_scale", "weight_global_scale"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_from_float_and_state_dict(kind, assert_close):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(96, 64), torch.randn(2, 3, 96)
    layer = QuantLinear.from_float(linear, f"w4a16-{kind}")
    state = layer.state_dict()
    assert list(state) == [*NAMES[kind], "bias"]
    scheme = Scheme.parse(f"w4a16-{kind}")
    weight_NK = compressed_tensors.decode(state, scheme).dequantize(torch.float64)
    want = x.double() @ weight_NK.t() + linear.bias.detach().double()
    assert_close("forward", want, layer(x), 1e-6)
    assert float((weight_NK - linear.weight.detach()).norm() / weight_NK.norm()) < 0.15

    other = QuantLinear(96, 64, f"w4a16-{kind}", bias=True)
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))
    halved = copy.deepcopy(layer).half()  # dtypes are the file's
    for name, tensor in halved.state_dict().items():
        assert tensor.dtype == state[name].dtype
    layer.prepare(torch.float32, release=True)
    with pytest.raises(KernelError, match="stored tensors were released"):
        layer.packed()
    layer.load_state_dict(state)
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("kind", KINDS)
def test_from_packed(kind):
    weight = random_fp4(kind, 16, 64)
    layer = QuantLinear.from_packed(weight)
    assert torch.equal(layer.dequantize(), weight.dequantize())
    with pytest.raises(KernelError, match="off_grid: expected integer codes"):
        layer.off_grid(weight.dequantize())


def test_two_global_scales_are_not_storable():
    merged = merge([random_fp4("nvfp4", 8, 64), random_fp4("nvfp4", 8, 64, std=1.0)])
    with pytest.raises(CheckpointError, match="its 16 outputs have several global scales"):
        QuantLinear.from_packed(merged)
    layer = QuantLinear.for_inference(merged, None, torch.float32)
    assert torch.equal(layer(torch.eye(64)).t(), merged.dequantize())


def test_replace_linears_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
    assert replace_linears(model, "w4a16-mxfp4", ignore=[]) == ["0", "1"]
    assert model(torch.ones(2, 64)).shape == (2, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_explain_names_the_kernels(kind):
    spec = Scheme.parse(f"w4a16-{kind}").weight
    shape = {"out_features": 2880, "in_features": 2880}
    text = str(explain("linear", device="cuda", dtype=torch.bfloat16, spec=spec, **shape))
    for row in ("-> w4a16: supported", "sm90_small_m: up to 64 rows", "triton: up to 1024 rows"):
        assert row in text
    text = str(explain("experts", device="cuda", dtype=torch.bfloat16, spec=spec, **shape))
    assert "-> triton: supported" in text and "sm90_few_tokens: few tokens of an expert" in text
    shape["in_features"] = 160  # 192 or 256 with padding
    text = str(explain("linear", device="cuda", dtype=torch.bfloat16, spec=spec, **shape))
    assert "sm90_small_m: takes groups divisible by 128" in text
