"""RMS norm over sharded channels. M: rows. N: channels of this rank."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from qkernels.rowwise.spec import NormSpec
from qserve.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOverRanks:
    """An RMS norm of rows whose channels are sharded over ranks."""

    communicator: Communicator
    total: int  # number of channels of all ranks
    counts: bool  # False: another rank has the same channels and adds their squares
    fixed_order: bool = False  # True: the bits of a row do not depend on the number of rows

    def __call__(self, x_MN: torch.Tensor, spec: NormSpec) -> torch.Tensor:
        x = x_MN.float()
        squares_M1 = _sum_by_halves(x.square()) if self.fixed_order else x.square().sum(-1, True)
        if not self.counts:
            squares_M1 = torch.zeros_like(squares_M1)
        squares_M1 = self.communicator.all_reduce(squares_M1)
        normed_MN = x * torch.rsqrt(squares_M1 / self.total + spec.eps)
        weight_N = spec.weight_C
        if weight_N.dtype == torch.float32:  # then only the final product is rounded
            return (normed_MN * weight_N).to(x_MN.dtype)
        return normed_MN.to(x_MN.dtype) * weight_N


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormOverRanks:
    """x * silu(z) with an RMS norm per group, for groups whose channels are sharded over ranks.

    A rank has channels of one group only. The result equals that of ops.gated_group_norm.
    """

    communicator: Communicator
    group: int  # group of this rank's channels
    num_groups: int
    total: int  # number of channels of a group on all ranks
    fixed_order: bool = False  # True: the bits of a row do not depend on the number of rows

    def __call__(
        self,
        x_MN: torch.Tensor,
        z_MN: torch.Tensor,
        weight_N: torch.Tensor,
        eps: float,
        norm_first: bool,
    ) -> torch.Tensor:
        wide_MN, gate_MN = x_MN.float(), functional.silu(z_MN.float())
        if not norm_first:
            wide_MN = wide_MN * gate_MN
        squares_MN = wide_MN.square()
        own_M1 = _sum_by_halves(squares_MN) if self.fixed_order else squares_MN.sum(-1, True)
        # One column per group, so that ranks of other groups add nothing to this rank's group.
        padding = self.group, self.num_groups - self.group - 1
        sums_MG = self.communicator.all_reduce(functional.pad(own_M1, padding))
        squares_M1 = sums_MG[:, self.group : self.group + 1]
        wide_MN = weight_N.float() * (wide_MN * torch.rsqrt(squares_M1 / self.total + eps))
        return (wide_MN * gate_MN if norm_first else wide_MN).to(x_MN.dtype)


def _sum_by_halves(x_MN: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, [M, 1], in a fixed order; torch's depends on the row count."""
    while (count := x_MN.shape[1]) > 1:
        half = count // 2
        last_MR = x_MN[:, 2 * half :]  # one column, or none
        x_MN = torch.cat([x_MN[:, :half] + x_MN[:, half : 2 * half], last_MR], 1)
    return x_MN
