"""Linear layers and layer norms for training that compute the same bits as the engine.

Suffixes of tensor names: M rows of x, N outputs, K inputs, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from qkernels import ops


class FixedOrderLinear(nn.Linear):
    """nn.Linear with a fixed order of sums: the bits of a row do not depend on the other rows."""

    @classmethod
    def from_float(cls, linear: nn.Linear) -> "FixedOrderLinear":
        """Return a layer with the parameters of a torch Linear, not copied."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., K] to [..., N], in x's dtype. Weight and bias are cast to this dtype."""
        bias_N = None if self.bias is None else self.bias.to(x.dtype)
        return _FixedOrder.apply(x, self.weight.to(x.dtype), bias_N)


class _FixedOrder(torch.autograd.Function):
    """The product in fixed order; the gradients have no fixed order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_NK)
        return ops.fixed_order_linear(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_NK = ctx.saved_tensors
        grad_MN = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_MN @ weight_NK).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_MN.t() @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = grad_MN.sum(0)
        return grad_x, grad_weight, grad_bias


class EngineLayerNorm(nn.LayerNorm):
    """nn.LayerNorm of the last dim: the engine's operation forward, torch's gradient backward."""

    @classmethod
    def from_float(cls, norm: nn.LayerNorm) -> "EngineLayerNorm":
        """Return a layer with the parameters of a torch LayerNorm, not copied."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.normalized_shape, layer.eps = norm.normalized_shape, norm.eps
        layer.elementwise_affine = norm.elementwise_affine
        layer.weight, layer.bias = norm.weight, norm.bias
        return layer.train(norm.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., C]."""
        if self.weight is None:
            return super().forward(x)
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)


class _LayerNorm(torch.autograd.Function):
    """The engine's operation forward, torch's gradient backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_C, bias_C)
        ctx.eps = eps
        spec = ops.NormSpec(weight_C=weight_C, eps=eps, kind="layer", bias_C=bias_C)
        normed_MC, _ = ops.norm(x.reshape(-1, x.shape[-1]), None, spec)
        return normed_MC.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [
                None if each is None else each.detach().requires_grad_()
                for each in ctx.saved_tensors
            ]
            x, weight_C, bias_C = inputs
            y = F.layer_norm(x, x.shape[-1:], weight_C, bias_C, ctx.eps)
            wanted = [each for each in inputs if each is not None]
            found = iter(torch.autograd.grad(y, wanted, grad))
        return *(None if each is None else next(found) for each in inputs), None
