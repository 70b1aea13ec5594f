"""The numerics of a weight-only weight, as the Gluon kernels take them."""

from dataclasses import dataclass

import torch

from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.limbs import K_STEP
from qkernels.wna16.prepack import offset_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNumerics:
    """A constexpr of the kernels. For groups divisible by a K step of 128 inputs."""

    bits: int
    steps_per_group: int
    offset: int  # what is subtracted from an unpacked code of a symmetric weight (prepack.py)
    has_offsets: bool
    has_bias: bool


def weight_numerics(weight: PreparedWeight, bias: torch.Tensor | None) -> WeightNumerics:
    return WeightNumerics(
        bits=weight.spec.bits,
        steps_per_group=weight.spec.group_length(weight.in_features) // K_STEP,
        offset=offset_of(weight),
        has_offsets="offsets" in weight.tensors,
        has_bias=bias is not None,
    )
