"""Sums over ranks in plain torch, which define the kernels' results.

One process holds the data of all ranks: `shares`, one tensor per rank, in order.
"""

from collections.abc import Sequence

import torch

from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput, SplitKPartials
from qkernels.rowwise.reference import norm
from qkernels.rowwise.spec import PLAIN, Branch, NormSpec


def all_reduce(shares: Sequence[LinearOutput]) -> torch.Tensor:
    """Return the float32 sum in rank order, rounded once. A rank's partial sums are added first."""
    first, *others = (_share(each) for each in shares)
    return sum(others, first).to(shares[0].dtype)


def _share(x: LinearOutput) -> torch.Tensor:
    if isinstance(x, SplitKPartials):
        first, *others = x.parts.unbind(0)
        return sum(others, first)
    return x.float()


def all_reduce_norm(
    shares: Sequence[LinearOutput],
    residual_MC: torch.Tensor,
    spec: NormSpec | None,
    out: InputForm = None,
    branch: Branch = PLAIN,
) -> tuple[LinearInput, torch.Tensor]:
    """Return the norm of all_reduce."""
    return norm(all_reduce(shares), residual_MC, spec, out, branch)
