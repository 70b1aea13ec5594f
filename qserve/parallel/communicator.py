"""What the ranks of a model exchange while they compute. Knows tensors, no model and no process.

Every rank calls the same operations in the same order, with tensors of the same shapes. Whatever
they return is bitwise the same on every rank: sums are taken in rank order. Under a CUDA graph they
may be captured once they have run; the ranks then capture and replay in the same order, too.
Legend: n ranks, M rows, C hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from qkernels import ops
from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput


class Communicator(Protocol):
    """The ranks that share out each layer (tensor parallel)."""

    rank: int
    size: int

    def all_reduce(self, x: LinearOutput) -> torch.Tensor:
        """The sum of all ranks' x, which may be split-K partials, in x's dtype. A new tensor."""
        ...

    def add_rms_norm_into(
        self,
        x_MC: LinearOutput,
        residual_MC: torch.Tensor,
        weight_C: torch.Tensor | None,
        eps: float,
        form: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        """ops.add_rms_norm_into of the sum of all ranks' x. The residual is the same on each."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, of one shape: [n, *x.shape], in rank order."""
        ...

    def row_boundaries(self, hidden_size: int, dtype: torch.dtype) -> list[int]:
        """Numbers of rows from which on sums run other kernels: what a warm-up has to run."""
        ...

    def check(self) -> None:
        """Raise if a rank did not take part in what was computed. Does not wait."""
        ...

    def abort(self) -> None:
        """Let a device that waits for a rank that is gone go on. Callable from any thread."""
        ...

    def close(self) -> None:
        """Give back what the communicator holds; nothing is exchanged after it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPartial:
    """Stands for a tensor: the sum of `x` over the ranks. The norm that follows takes it."""

    x: LinearOutput
    communicator: Communicator

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def total(self) -> torch.Tensor:
        """The tensor."""
        return self.communicator.all_reduce(self.x)
