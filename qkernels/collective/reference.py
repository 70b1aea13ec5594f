"""Sums over ranks in plain torch: the definition that kernels follow.

Here one process has what all ranks have: `shares`, one for each rank, in order.
"""

from collections.abc import Sequence

import torch

from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import LinearOutput, SplitKPartials
from qkernels.rowwise import reference as rowwise
from qkernels.rowwise.branch import PLAIN, Branch


def all_reduce(shares: Sequence[LinearOutput]) -> torch.Tensor:
    """The sum in float32, in the order of ranks, rounded once. Partial sums are added before."""
    first, *others = (_share(each) for each in shares)
    return sum(others, first).to(shares[0].dtype)


def _share(x: LinearOutput) -> torch.Tensor:
    if isinstance(x, SplitKPartials):
        first, *others = x.parts.unbind(0)
        return sum(others, first)
    return x.float()


def all_reduce_add_rms_norm_into(
    shares: Sequence[LinearOutput],
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor | None,
    eps: float,
    form: InputForm,
    branch: Branch = PLAIN,
) -> tuple[LinearInput, torch.Tensor]:
    """add_rms_norm of all_reduce, in a form."""
    inputs = all_reduce(shares), residual_MC, weight_C, eps
    if isinstance(form, InputRounding):
        *codes, total_MC = rowwise.add_rms_norm_quantize(*inputs, *form, branch=branch)
        return Codes(*codes), total_MC
    if isinstance(form, LimbForm):
        return rowwise.add_rms_norm_limbs(*inputs, form, branch=branch)
    return rowwise.add_rms_norm(*inputs, branch=branch)
