"""Input gradient of a frozen quantized linear, for training the layers around it."""

from collections.abc import Callable

import torch


class FrozenLinear(torch.autograd.Function):
    """y = run(x), with the gradient grad @ dequantize() for x."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, run: Callable, dequantize: Callable) -> torch.Tensor:
        ctx.dequantize = dequantize
        return run(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad @ ctx.dequantize(), None, None
