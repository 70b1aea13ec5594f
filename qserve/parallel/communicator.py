"""Communicator: collective operations of a model's ranks.

Every rank calls the same operations in the same order, with tensors of the same shapes. Results are
bitwise equal on every rank, because all-reduces add in rank order. Operations may be captured in a
CUDA graph after they have run once; all ranks then capture and replay in the same order.

n: ranks. M: rows. C: hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from qkernels import ops
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput


class RowSum(Protocol):
    """The sum of x [M, C] over all ranks, whose rows are sent while later rows are computed.

    The bits of a row depend neither on the division into chunks nor on the other rows, and equal
    those of all_reduce with a fixed order. Read it once, before another one is begun.
    """

    def send(self, start: int, stop: int) -> None:
        """Start to send rows [start, stop) of x, which are complete in the current stream."""
        ...

    def total(self) -> torch.Tensor:
        """Return the sum. All rows must have been sent."""
        ...

    def norm(
        self,
        residual_MC: torch.Tensor | None,
        spec: ops.NormSpec | None,
        out: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        """Return ops.norm of the sum."""
        ...


class Communicator(Protocol):
    """The ranks that share each layer (tensor parallelism)."""

    rank: int
    size: int
    overlaps: bool  # False: begin_sum returns None, for measurements; equal on all ranks

    def all_reduce(self, x: LinearOutput) -> torch.Tensor:
        """Return the sum of x over all ranks, as a new tensor in x's dtype.

        `x` may be split-K partials.
        """
        ...

    def norm(
        self,
        x_MC: LinearOutput,
        residual_MC: torch.Tensor,
        spec: ops.NormSpec | None,
        out: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        """Return ops.norm of the sum of x over all ranks. All ranks have the same residual."""
        ...

    def begin_sum(self, x_MC: torch.Tensor) -> RowSum | None:
        """Return the sum of x, whose rows will be written and sent; None: use all_reduce."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of all ranks, [n, *x.shape], in rank order. All shapes must be equal."""
        ...

    def row_boundaries(self, hidden_size: int, dtype: torch.dtype) -> list[int]:
        """Return the numbers of rows at which an all-reduce switches kernels, for the warm-up."""
        ...

    def check(self) -> None:
        """Raise an error if a rank did not take part in a collective. Does not wait."""
        ...

    def abort(self) -> None:
        """Release a device that waits for a dead rank. Thread-safe."""
        ...

    def close(self) -> None:
        """Free the communicator's resources. No collective may follow."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPartial:
    """Placeholder for the sum of `x` over the ranks. The next norm computes the sum."""

    x: LinearOutput
    communicator: Communicator
    row_sum: RowSum | None = None  # the sum, if it is already under way

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def total(self) -> torch.Tensor:
        """Compute the sum."""
        if self.row_sum is not None:
            return self.row_sum.total()
        return self.communicator.all_reduce(self.x)
