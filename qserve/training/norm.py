"""EngineLayerNorm: a layer norm whose sums are those of the engine.

Legend: M rows of x, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from qkernels import ops


class EngineLayerNorm(nn.LayerNorm):
    """nn.LayerNorm of the last dim: the engine's operation forward, torch's gradient back."""

    @classmethod
    def from_float(cls, norm: nn.LayerNorm) -> "EngineLayerNorm":
        """Take over a torch LayerNorm's own parameters."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.normalized_shape, layer.eps = norm.normalized_shape, norm.eps
        layer.elementwise_affine = norm.elementwise_affine
        layer.weight, layer.bias = norm.weight, norm.bias
        return layer.train(norm.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C]."""
        if self.weight is None:
            return super().forward(x)
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)


class _LayerNorm(torch.autograd.Function):
    """Value of the engine's operation, gradient of torch's."""

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
