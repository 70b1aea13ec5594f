"""Quantized linear as a float matmul: the weight is dequantized once, at load.

This is the default on a CPU, where dequantizing at each call would cost far more than the product.
"""

import torch

from formats.in_memory.weights import Weight
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Dequantize the weight to `dtype`."""
    weight_NK = packed.dequantize(dtype)
    tensors = {"weight_NK": weight_NK.to(packed.device if device is None else device)}
    return PreparedWeight.of(packed, kernel="dense", tensors=tensors, dtype=dtype)


def run(
    plan: GemmPlan, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [M, K] by the dequantized weight. Returns [M, N]."""
    return torch.nn.functional.linear(x, weight.tensors["weight_NK"], bias)
