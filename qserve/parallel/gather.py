"""Gathers columns that are sharded over ranks. M: rows. N: columns."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from qserve.parallel.communicator import Communicator


def gathered_columns(
    communicator: Communicator, x_MN: torch.Tensor, widths: Sequence[int]
) -> torch.Tensor:
    """Concatenate the columns of all ranks, [M, widths[rank]], to [M, sum(widths)]."""
    widest = max(widths)
    if x_MN.shape[1] < widest:
        x_MN = functional.pad(x_MN, (0, widest - x_MN.shape[1]))
    parts_nMN = communicator.all_gather(x_MN)
    if min(widths) == widest:
        return parts_nMN.transpose(0, 1).flatten(1)
    parts = zip(parts_nMN.unbind(0), widths, strict=True)
    return torch.cat([part[:, :width] for part, width in parts], 1)
