"""QuantLinear computes with the tensors that it holds now, as state_dict and dequantize do."""

import copy
import pickle

import pytest
import torch

from qkernels import QuantLinear

N, K = 64, 256
X = torch.randn(3, K, generator=torch.Generator().manual_seed(1))


def make(scheme="w4a16-asym"):
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    return QuantLinear.from_float(weight_NK, scheme, bias=torch.ones(N))


def double_in_place(layer):
    layer.scales.mul_(2)


def double(layer):
    layer.scales = layer.scales * 2


def double_twice_at_one_address(layer):
    """The second tensor often gets the memory of the tensor that the layer was prepared from."""
    layer.scales = layer.scales * 4
    layer.scales = layer.scales / 2


def one_code(layer):
    layer.qweight[0, 0] ^= 0x7


def zero_points(layer):
    layer.qzeros.copy_(layer.qzeros ^ 0x1)


def bias(layer):
    layer.bias = layer.bias + 1


def no_bias(layer):
    layer.bias = None


CHANGES = (double_in_place, double, double_twice_at_one_address, one_code, zero_points)


@pytest.mark.parametrize("change", [*CHANGES, bias, no_bias])
@pytest.mark.parametrize("inference", [False, True])
def test_forward_follows_a_change_of_the_tensors(change, inference):
    layer = make()
    with torch.inference_mode(inference):
        before = layer(X)
        change(layer)
        found = layer(X)
        own = torch.zeros(N) if layer.bias is None else layer.bias
        wanted = torch.nn.functional.linear(X, layer.dequantize(), own.float())
    assert not torch.equal(found, before)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_unchanged_layer_is_prepared_once(monkeypatch):
    layer = make()
    layer(X)
    monkeypatch.setattr(layer, "prepare", lambda *_: pytest.fail("prepared again"))
    layer(X)
    layer.state_dict()
    layer.dequantize()
    layer(X)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_follow_their_own_tensors(copied):
    layer = make()
    before = layer(X)
    other = copied(layer)
    double(other)
    assert not torch.equal(other(X), before)
    assert torch.equal(layer(X), before)


@pytest.mark.parametrize("dtype_of_scales", [torch.float16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
def test_layer_keeps_its_numbers_if_a_solver_reuses_its_memory(dtype_of_scales, groups, symmetric):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (N, K), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 256, (N, groups), generator=generator).to(torch.uint8)
    scales = (torch.rand(N, groups, generator=generator) + 0.01).to(dtype_of_scales)
    bias = torch.ones(N)
    scheme, zeros = ("w8a16-sym", None) if symmetric else ("w8a16-asym", zeros)
    size = "channel" if groups == 1 else "g128"
    layer = QuantLinear.from_codes(codes, scales, zeros, scheme=f"{scheme}-{size}", bias=bias)
    before, weight = layer(X), layer.dequantize()
    for own in (codes, scales, zeros, bias):
        if own is not None:
            own.zero_()
    assert torch.equal(layer.dequantize(), weight)
    assert torch.equal(layer(X), before)


def test_layer_of_4_bit_floats_keeps_its_numbers():
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    packed = QuantLinear.from_float(weight_NK, "w4a16-nvfp4").packed()
    layer = QuantLinear.from_packed(packed)
    before = layer(X)
    packed.bytes_NB.zero_()
    packed.scales_NG.view(torch.uint8).zero_()
    assert torch.equal(layer(X), before)


def test_released_layer_runs_as_it_was_prepared():
    layer = make()
    before = layer(X)
    layer.prepare(torch.float32, release=True)
    assert torch.equal(layer(X), before)
    assert torch.equal(copy.deepcopy(layer)(X), before)
