"""FixedOrderLinear: a float linear with the sums of the engine's batch-invariant mode.

Legend: M rows of x, N outputs, K inputs.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qkernels import ops


class FixedOrderLinear(nn.Linear):
    """nn.Linear; a row of the result has the same bits whatever the other rows are."""

    @classmethod
    def from_float(cls, linear: nn.Linear) -> "FixedOrderLinear":
        """Take over a torch Linear's own parameters."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] to [..., N], in x's dtype, to which weight and bias are cast."""
        bias_N = None if self.bias is None else self.bias.to(x.dtype)
        return _FixedOrder.apply(x, self.weight.to(x.dtype), bias_N)


class _FixedOrder(torch.autograd.Function):
    """The product and its gradients, which need no order."""

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
