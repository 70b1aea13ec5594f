"""Products with a config of the test's choice."""

import torch

from qkernels import ops
from qkernels.linear.prepared import PreparedWeight
from qkernels.wna16 import gemm


def multiply(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None, *, tile=None
) -> torch.Tensor:
    """ops.linear of a prepacked weight, with this config; None: the one that is chosen."""
    plan = None if tile is None else gemm.plan_for(tile, weight.problem)
    return ops.linear(x, weight, bias, plan)
