"""RMS norm of rows whose channels are shared out over ranks. Legend: M rows, N channels of ours."""

from dataclasses import dataclass

import torch

from qserve.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOverRanks:
    """ops.rms_norm of rows that ranks have parts of."""

    communicator: Communicator
    total: int  # channels of all ranks
    counts: bool  # False: another rank has the same channels, and adds their squares

    def __call__(self, x_MN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
        x = x_MN.float()
        squares_M1 = x.square().sum(-1, keepdim=True)
        if not self.counts:
            squares_M1 = torch.zeros_like(squares_M1)
        squares_M1 = self.communicator.all_reduce(squares_M1)
        normed_MN = x * torch.rsqrt(squares_M1 / self.total + eps)
        if weight_N.dtype == torch.float32:  # the product alone is rounded
            return (normed_MN * weight_N).to(x_MN.dtype)
        return normed_MN.to(x_MN.dtype) * weight_N
