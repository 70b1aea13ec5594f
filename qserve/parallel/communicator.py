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


class Communicator(Protocol):
    """The ranks that share each layer (tensor parallelism)."""

    rank: int
    size: int

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

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def total(self) -> torch.Tensor:
        """Compute the sum."""
        return self.communicator.all_reduce(self.x)
