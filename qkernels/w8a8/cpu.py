"""W8A8 on a CPU by torch's int8 product, bit-exact with reference.py.

Legend: M rows of x, N outputs, K inputs.
"""

import functools
from dataclasses import replace

import torch

from formats.in_memory.weights import Weight
from qkernels.linear import reference as linear_reference
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes


@functools.cache
def product_is_exact() -> bool:
    """Return True if torch sums int8 products exactly: without VNNI a CPU may add in 16 bits."""
    for a, b in ((127, 127), (-128, -128), (-128, 127), (127, -128)):
        a_MK = torch.full((17, 256), a, dtype=torch.int8)
        b_NK = torch.full((24, 256), b, dtype=torch.int8)
        if not (torch._int_mm(a_MK, b_NK.t()) == 256 * a * b).all():
            return False
    return True


def prepare_weight(
    packed: Weight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Return signed codes [N, K] and float32 scales [N, 1], as in the reference."""
    return replace(linear_reference.prepare_weight(packed, dtype, device), kernel="cpu_w8a8")


def run(
    plan: GemmPlan, x: Codes, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply codes [M, K] to [M, N]."""
    return linear_codes(*x, weight, bias)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply codes [M, K] to [M, N], rounded once at the end."""
    sums_MN = torch._int_mm(codes_MK, weight.tensors["int8"].t())
    return linear_reference.scale_sums(sums_MN, scales_M1, weight, bias)
