"""Input gradient of a frozen quantized linear, for training the layers around it."""

from collections.abc import Callable

import torch


class FrozenLinear(torch.autograd.Function):
    """y = run(x), with the gradient grad @ dequantize() for x."""

    @staticmethod
    def forward(x: torch.Tensor, run: Callable, dequantize: Callable) -> torch.Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.dequantize = inputs[2]

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad @ ctx.dequantize(), None, None
