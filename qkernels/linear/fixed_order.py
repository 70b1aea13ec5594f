"""Batch-invariant products with float weights: a row's bits do not depend on the other rows.

On a GPU the inputs of an output are added 16 at a time in one chain, the same for every M and every
tile size. On a CPU each row is multiplied alone. Legend: M rows of x, K inputs, N outputs.
"""

import torch

from formats.in_memory.weights import Weight
from qkernels.errors import KernelError
from qkernels.linear import dense, reference
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes
from qkernels.problem import HALF_DTYPES


def fixed_order_linear(
    x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [..., K] by the float weight's transpose and add the bias. Returns [..., N].

    The bits of a row of the result do not depend on the other rows. Raises KernelError for float32
    on a GPU.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu":
        y_MN = torch.empty(x_MK.shape[0], weight_NK.shape[0], dtype=x.dtype)
        for row in range(x_MK.shape[0]):
            y_MN[row] = torch.nn.functional.linear(x_MK[row], weight_NK, bias_N)
    else:
        if x.dtype not in HALF_DTYPES:
            raise KernelError(
                "fixed_order_linear x",
                f"expected float16 or bfloat16 on a GPU, found {x.dtype}",
                "call linear, or convert x",
            )
        from qkernels.linear import triton_float

        y_MN = triton_float.multiply(x_MK.contiguous(), weight_NK, bias_N)
    return y_MN.view(*x.shape[:-1], weight_NK.shape[0])


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Dequantize the weight, for a CPU. With 8-bit activations, prepare it as reference.py does."""
    return (dense if packed.activation is None else reference).prepare_weight(packed, dtype, device)


def run(
    plan: GemmPlan,
    x: torch.Tensor | Codes,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row of x [M, K], or of its codes, on its own. Returns [M, N]."""
    if weight.activation is None:
        return fixed_order_linear(x, weight.tensors["weight_NK"], bias)
    if isinstance(x, Codes):
        return linear_codes(*x, weight, bias)
    return torch.cat([reference.linear(row, weight, bias) for row in x.split(1)])


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement ops.linear_codes one row at a time."""
    rows = zip(codes_MK.split(1), scales_M1.split(1), strict=True)
    return torch.cat([reference.linear_codes(*row, weight, bias) for row in rows])
