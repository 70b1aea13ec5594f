"""W4A8 on a CPU by float32 products of integers, bit-exact with reference.py.

A sum of products of numbers up to 128 and 8 is exact in float32 up to 2^24, in any order. If scales
are multiples of one number in each row, codes are numbers up to 120, and there is one group. The
int8 product of torch takes 15 times as long with AVX2. A code takes a byte in memory.

Legend: M rows of x, N outputs, K inputs, G groups of g inputs.
"""

import torch

from formats.in_memory.packed import PackedWeight
from qkernels.linear import reference as linear_reference
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.codes import Codes

EXACT_INPUTS = 2**24 // (128 * 8)  # most inputs of an exact sum
EXACT_MULTIPLES = 2**24 // (128 * 120)  # the same for codes times multiples


def prepare_weight(
    packed: PackedWeight, dtype: torch.dtype, device: torch.device | str | None = None
) -> PreparedWeight:
    """Return signed codes [G, N, g] and float32 scales [G, N]."""
    packed = packed if device is None else packed.to(device)
    found = linear_reference.int8_form(packed)
    if found is None:
        signed_NK, scales_NG = linear_reference.signed_codes(packed), packed.scales_NG
    else:
        signed_NK, scales_NG = found
    tensors = {
        "int8": signed_NK.unflatten(1, (scales_NG.shape[1], -1)).transpose(0, 1).contiguous(),
        "scales": scales_NG.float().t().contiguous(),
    }
    return PreparedWeight.of(
        packed, kernel="cpu_w4a8", tensors=tensors, dtype=dtype, rounds_input=True
    )


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
    weight_GNg, scales_GN = weight.tensors["int8"], weight.tensors["scales"]
    x_MK = codes_MK.float()
    in_multiples = weight_GNg.shape[2] > weight.problem.group
    most = EXACT_MULTIPLES if in_multiples else EXACT_INPUTS
    sums = (
        _exact_sums(x, w.float(), most)
        for x, w in zip(x_MK.split(weight_GNg.shape[2], 1), weight_GNg, strict=True)
    )
    return linear_reference.scale_group_sums(sums, scales_M1, scales_GN, bias, weight.dtype)


def _exact_sums(x_Mg: torch.Tensor, weight_Ng: torch.Tensor, most: int) -> torch.Tensor:
    """Return exact sums of a group's integers [M, N]; int64 for more than `most` inputs."""
    if x_Mg.shape[1] <= most:
        return x_Mg @ weight_Ng.t()
    parts = zip(x_Mg.split(most, 1), weight_Ng.split(most, 1), strict=True)
    return sum((x @ w.t()).to(torch.int64) for x, w in parts)
