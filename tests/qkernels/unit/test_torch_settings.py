"""QuantLinear in programs with autocast, another default device, or another default dtype."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from formats.errors import CheckpointError
from qkernels import QuantLinear, replace_linears

N, K = 96, 384
INTEGERS = ("w4a16-sym", "w4a16-asym", "w8a16-sym", "w8a8", "w4a8")
FLOATS = ("w4a16-mxfp4", "w4a16-nvfp4")


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
}


@pytest.fixture
def weight_NK():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) / 16


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOATS])
def test_settings_of_the_program_do_not_change_the_rounding(weight_NK, scheme, setting):
    plain = QuantLinear.from_float(weight_NK, scheme)
    with SETTINGS[setting]():
        layer = QuantLinear.from_float(weight_NK, scheme)
        empty = QuantLinear(K, N, scheme)
        again = QuantLinear(K, N, scheme, device="cpu")
        empty.load_state_dict(plain.state_dict(), assign=True)
        again.load_state_dict(plain.state_dict())
        dense = layer.dequantize()
    for found in (layer, empty, again):
        for name, tensor in plain.state_dict().items():
            own = found.state_dict()[name]
            assert own.dtype == tensor.dtype, name
            assert torch.equal(_bytes(own), _bytes(tensor)), name
    assert torch.equal(dense, plain.dequantize())


@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_casts_the_input_and_nothing_else(weight_NK, scheme, given):
    """Sums of int8 products in bfloat16 would be wrong."""
    layer = QuantLinear.from_float(weight_NK, scheme, bias=torch.arange(N) / N)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(given)
    expected = layer(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        usual = F.linear(x, layer.dequantize())
    assert found.dtype == usual.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_gradient_of_the_input_under_autocast(weight_NK):
    layer = QuantLinear.from_float(weight_NK, "w4a16-sym")
    x = torch.randn(5, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        total = layer(x).float().sum()
    total.backward()
    wanted = layer.dequantize().sum(0).expand(5, K)
    assert x.grad.dtype == torch.float32
    assert torch.allclose(x.grad, wanted, rtol=0.02, atol=0.02 * wanted.abs().max())


def test_input_on_the_meta_device_gives_the_shape_of_the_result():
    """As tools that count operations run a model. The meta device has no autocast."""
    layer = QuantLinear.from_float(nn.Linear(K, N), "w4a16-sym")
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(torch.ones(2, 3, K, device="meta"))
    assert found.is_meta and found.shape == (2, 3, N)


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", *FLOATS])
def test_layer_on_the_meta_device_has_no_tensor_elsewhere(weight_NK, scheme):
    """A skeleton of a large model must not take its memory, nor keep a bias without numbers."""
    bias = torch.arange(float(N))
    full = QuantLinear.from_float(weight_NK, scheme, bias=bias)
    with torch.device("meta"):
        layer = QuantLinear(K, N, scheme, bias=True)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    for use in (layer.packed, layer.dequantize, lambda: layer(torch.ones(1, K))):
        with pytest.raises(CheckpointError, match=r"on the meta device.*assign=True"):
            use()
    layer.load_state_dict(full.state_dict(), assign=True)
    x = torch.randn(3, K)
    assert torch.equal(layer(x), full(x))
    spread = QuantLinear(K, N, scheme, bias=True, device="meta").to_empty(device="cpu")
    spread.load_state_dict(full.state_dict())
    assert torch.equal(spread(x), full(x))


@pytest.mark.parametrize("scheme", ["w4a16-sym", *FLOATS])
def test_empty_layer_is_refused(scheme):
    with pytest.raises(CheckpointError, match="is empty"):
        QuantLinear(K, N, scheme)(torch.ones(1, K))


@pytest.mark.parametrize("scheme", ["w4a16-sym", *FLOATS])
def test_layer_of_zeros_is_not_empty(scheme):
    layer = QuantLinear.from_float(torch.zeros(N, K), scheme)
    again = QuantLinear(K, N, scheme)
    again.load_state_dict(layer.state_dict())
    assert not again(torch.ones(1, K)).any()


def test_bytes_of_float8_scales_are_refused(weight_NK):
    """torch would take the byte of a scale for its value."""
    state = QuantLinear.from_float(weight_NK, "w4a16-nvfp4").state_dict()
    state["weight_scale"] = state["weight_scale"].view(torch.uint8)
    with pytest.raises(RuntimeError, match=r"weight_scale: expected torch.float8_e4m3fn, found"):
        QuantLinear(K, N, "w4a16-nvfp4").load_state_dict(state)


@pytest.mark.parametrize("setting", ["", *SETTINGS])
def test_replaced_linears_are_the_same_with_any_setting(setting):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=True), nn.Linear(N, K))
    with SETTINGS.get(setting, nullcontext)():
        replace_linears(model, "w4a16-sym-g32", ignore=[])
    plain = QuantLinear.from_float(_first_linear(), "w4a16-sym-g32")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model[0].state_dict()[name], tensor), name


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def _first_linear():
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=True)
