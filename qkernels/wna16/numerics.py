"""A weight-only weight's numerics, as kernels in Gluon take them. Knows no kernel."""

from dataclasses import dataclass

import torch

from qkernels.linear.prepared import PreparedWeight
from qkernels.operands.limbs import K_STEP
from qkernels.wna16.prepack import offset_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNumerics:
    """Constants that are compiled in. For groups divisible by a step of 128 inputs."""

    bits: int
    steps_of_group: int
    offset: int  # what is subtracted where symmetric, as offsets have it
    has_offsets: bool
    has_bias: bool


def weight_numerics(weight: PreparedWeight, bias: torch.Tensor | None) -> WeightNumerics:
    return WeightNumerics(
        bits=weight.spec.bits,
        steps_of_group=weight.spec.group_length(weight.in_features) // K_STEP,
        offset=offset_of(weight),
        has_offsets="offsets" in weight.tensors,
        has_bias=bias is not None,
    )
