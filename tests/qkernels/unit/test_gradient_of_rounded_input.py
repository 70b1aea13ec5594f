"""Gradient of x through linears that round x to 8 bits: rounding counts as the identity."""

import weakref

import pytest
import torch

from formats.errors import InputError
from qkernels import QuantLinear, TrainableQuantLinear

N, K = 64, 256
SCHEMES = ("w8a8", "w4a8", "w4a8-fp8")


def make(scheme):
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    return QuantLinear.from_float(weight_NK, scheme)


def gradients(layer, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 2, K, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(3, 2, N, generator=generator).to(dtype)
    layer(x).backward(grad)
    return x.grad, grad


@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_is_the_product_with_the_dequantized_weight(scheme, activations):
    layer = make(scheme)
    found, grad = gradients(layer, activations)
    want = grad.double() @ layer.dequantize().double()
    error = (found.double() - want).norm() / want.norm()
    assert error < (1e-5 if activations == torch.float32 else 1e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_equals_the_trainable_layers(scheme):
    linear = torch.nn.Linear(K, N)
    found, _ = gradients(QuantLinear.from_float(linear, scheme))
    want, _ = gradients(TrainableQuantLinear.from_float(linear, scheme))
    torch.testing.assert_close(found, want)


def test_a_loss_falls_through_a_layer_that_rounds():
    """An input is fitted to a target through the layer."""
    layer, x = make("w8a8"), torch.zeros(1, K, requires_grad=True)
    target = torch.randn(1, N, generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(20):
        loss = (layer(x) - target).square().sum()
        losses.append(loss.item())
        (x.grad,) = torch.autograd.grad(loss, x)
        with torch.no_grad():
            x -= 5e-4 * x.grad
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_released_layer_refuses_a_gradient_that_it_cannot_compute(scheme):
    layer = make(scheme).prepare(torch.float32, release=True)
    with pytest.raises(InputError, match="has no gradient here.*without release=True"):
        gradients(layer)


def test_output_is_the_same_with_and_without_gradient():
    layer, x = make("w8a8"), torch.randn(4, K)
    assert torch.equal(layer(x), layer(x.requires_grad_()))


def test_backward_keeps_no_input():
    """Memory of activations is what limits training."""
    x = torch.randn(2, K, requires_grad=True)
    doubled = x * 2
    gone = weakref.ref(doubled)
    y = make("w8a8")(doubled)
    del doubled
    assert gone() is None
    y.sum().backward()
    assert x.grad is not None


def test_change_between_forward_and_backward_is_refused():
    """Torch refuses it too, where it keeps the changed tensor itself."""
    layer, x = make("w8a8"), torch.randn(2, K, requires_grad=True)
    y = layer(x)
    layer.scales.mul_(2)
    with pytest.raises(InputError, match="changed between forward and backward"):
        y.sum().backward()
