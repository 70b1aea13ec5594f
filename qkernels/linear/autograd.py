"""Input gradient of a frozen quantized layer, for use inside training."""

from collections.abc import Callable

import torch


class FrozenLinear(torch.autograd.Function):
    """y = run(x); the gradient for x is grad @ dequantize()."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, run: Callable, dequantize: Callable) -> torch.Tensor:
        ctx.dequantize = dequantize
        return run(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad @ ctx.dequantize(), None, None
