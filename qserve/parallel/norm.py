"""RMS norm over sharded channels. Legend: M rows, N channels of this rank."""

from dataclasses import dataclass

import torch

from qkernels.rowwise.spec import NormSpec
from qserve.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOverRanks:
    """An RMS norm of rows whose channels are sharded over ranks."""

    communicator: Communicator
    total: int  # channels of all ranks
    counts: bool  # False: another rank has the same channels and adds their squares

    def __call__(self, x_MN: torch.Tensor, spec: NormSpec) -> torch.Tensor:
        x = x_MN.float()
        squares_M1 = x.square().sum(-1, keepdim=True)
        if not self.counts:
            squares_M1 = torch.zeros_like(squares_M1)
        squares_M1 = self.communicator.all_reduce(squares_M1)
        normed_MN = x * torch.rsqrt(squares_M1 / self.total + spec.eps)
        weight_N = spec.weight_C
        if weight_N.dtype == torch.float32:  # only the product is rounded
            return (normed_MN * weight_N).to(x_MN.dtype)
        return normed_MN.to(x_MN.dtype) * weight_N
