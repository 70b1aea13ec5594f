"""QuantLinear under torch.compile equals QuantLinear without it, also after changes."""

import copy

import pytest
import torch

from formats.errors import InputError
from qkernels import QuantLinear

N, K = 64, 256
X = torch.randn(3, K, generator=torch.Generator().manual_seed(1))


def make(scheme="w4a16-sym", seed=0, outputs=N):
    weight_NK = torch.randn(outputs, K, generator=torch.Generator().manual_seed(seed))
    return QuantLinear.from_float(weight_NK, scheme, bias=torch.linspace(-1, 1, outputs))


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def double_in_place(layer):
    layer.scales.mul_(2)


def other_tensor(layer):
    layer.scales = layer.scales * 2


def other_state(layer):
    layer.load_state_dict(make(seed=2).state_dict())


def other_bias(layer):
    layer.bias.add_(1)


@pytest.mark.parametrize("change", [double_in_place, other_tensor, other_state, other_bias])
def test_compiled_layer_follows_a_change_of_the_tensors(change):
    layer = make()
    run = compiled(layer)
    before = layer(X)
    assert torch.equal(run(X), before)
    with torch.no_grad():
        change(layer)
    assert torch.equal(run(X), layer(X))
    assert not torch.equal(run(X), before)


def test_graph_that_changes_the_tensors_itself():
    layer = make()

    def step(x):
        layer.scales.mul_(2)
        return layer(x)

    want = step(X)
    layer.load_state_dict(make().state_dict())
    assert torch.equal(compiled(step)(X), want)
    assert torch.equal(layer(X), want)


def test_tensors_given_for_one_call():
    layer = make()
    state = {name: each.clone() for name, each in layer.state_dict().items()}
    state["scales"] *= 2

    def call(state, x):
        return torch.func.functional_call(layer, state, (x,))

    assert torch.equal(compiled(call)(state, X), call(state, X))
    assert not torch.equal(call(state, X), layer(X))


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", "w4a8-fp8", "w4a16-mxfp4"])
@pytest.mark.parametrize("released", [False, True])
def test_output_and_gradient(scheme, released):
    layer = make(scheme).prepare(torch.float32, release=released)
    run = compiled(layer)
    assert torch.equal(run(X), layer(X))
    if released and layer.scheme.activation is not None:
        return  # such a layer has no gradient (test_gradient_of_rounded_input.py)
    found, want = X.clone().requires_grad_(), X.clone().requires_grad_()
    run(found).square().sum().backward()
    layer(want).square().sum().backward()
    assert (found.grad - want.grad).norm() < 1e-6 * want.grad.norm()


def test_autocast_and_other_dtypes():
    layer = make()
    run = compiled(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(X), layer(X))
    assert torch.equal(run(X.half()), layer(X.half()))
    assert torch.equal(run(X), layer(X))


def test_one_graph_serves_layers_of_one_shape():
    """Each layer compiled alone, as decoders are: more layers than torch recompiles for."""
    layers = [make(seed=seed) for seed in range(torch._dynamo.config.recompile_limit + 2)]
    torch._dynamo.reset()
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
        assert torch.equal(layer(X), layer.forward(X))


def test_copies_are_other_layers():
    layer = make()
    other = copy.deepcopy(layer)
    double_in_place(other)
    run = compiled(lambda x: (layer(x), other(x)))
    for found, each in zip(run(X), (layer, other), strict=True):
        assert torch.equal(found, each(X))


def test_vmap():
    layer, x = make(), torch.randn(3, 5, K)
    run = compiled(
        torch.vmap(lambda each: layer(each), in_dims=1)
    )  # dynamo cannot trace repr(layer)
    assert torch.equal(run(x), layer(x.movedim(1, 0)))


def test_wrong_input_is_named():
    with pytest.raises(InputError, match=r"expected \[\.\.\., 256\], found \[3, 64\]"):
        make()(X[:, :64])
    with pytest.raises(Exception, match=r"expected \[\.\.\., 256\], found \[3, 64\]"):
        compiled(make())(X[:, :64])
