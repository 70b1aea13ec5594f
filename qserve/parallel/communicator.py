"""Communicator: collective operations of a model's ranks.

Every rank calls the same operations in the same order, with tensors of the same shapes. Results are
bitwise equal on every rank: sums are taken in rank order. Operations may be captured in a CUDA
graph once they have run; the ranks then capture and replay in the same order, too. Legend: n ranks,
M rows, C hidden size.
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
        """The sum of all ranks' x, which may be split-K partials, in x's dtype. A new tensor."""
        ...

    def norm(
        self,
        x_MC: LinearOutput,
        residual_MC: torch.Tensor,
        spec: ops.NormSpec | None,
        out: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        """ops.norm of the sum of all ranks' x. All ranks have the same residual."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x of equal shape: [n, *x.shape], in rank order."""
        ...

    def row_boundaries(self, hidden_size: int, dtype: torch.dtype) -> list[int]:
        """Numbers of rows from which on sums use other kernels: a warm-up runs each."""
        ...

    def check(self) -> None:
        """Raise if a rank did not take part in a collective. Does not wait."""
        ...

    def abort(self) -> None:
        """Release a device that waits for a rank that is gone. Thread-safe."""
        ...

    def close(self) -> None:
        """Free the communicator's resources; no collective may follow."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPartial:
    """Placeholder for the sum of `x` over the ranks, which the following norm computes."""

    x: LinearOutput
    communicator: Communicator

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def total(self) -> torch.Tensor:
        """Compute the sum."""
        return self.communicator.all_reduce(self.x)
