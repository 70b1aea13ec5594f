"""TorchCommunicator: collectives of torch.distributed, gloo on CPUs and NCCL on GPUs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from qkernels import ops
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput, SplitKPartials
from qserve.parallel.communicator import RowSum

# Up to this size, all-reduces run in float32, so that results are rounded once, as on one GPU; the
# cost of small ones is latency. Larger ones run in the activations' dtype.
FLOAT32_BYTES = 2**20
# With a fixed order, all-reduces gather pieces of this size from each rank.
PIECE_BYTES = 2**24


class TorchCommunicator:
    """The reference implementation of all operations, over a process group.

    `fixed_order`: the bits of an all-reduced row do not depend on the number of rows.
    """

    def __init__(self, group: dist.ProcessGroup, *, fixed_order: bool = False) -> None:
        self.group, self.fixed_order = group, fixed_order
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.overlaps = True
        self._gathers = dist.get_backend(group) == "gloo"

    def all_reduce(self, x: LinearOutput) -> torch.Tensor:
        partial = self.own_partial(x)
        if self._gathers:
            # The order in which gloo adds is undocumented.
            return self._sum_in_rank_order(partial.float(), x.dtype)
        if self.fixed_order:
            # NCCL adds long messages in a different order than short ones.
            pieces = partial.flatten().split(PIECE_BYTES // partial.element_size())
            sums = [self._sum_in_rank_order(piece, x.dtype) for piece in pieces]
            return torch.cat(sums).view(x.shape)
        few = partial.numel() * torch.float32.itemsize <= FLOAT32_BYTES
        dtype = torch.float32 if few else x.dtype
        # torch reduces in place, and the input must not change.
        summed = partial.to(dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed.to(x.dtype)

    def own_partial(self, x: LinearOutput) -> torch.Tensor:
        """Return this rank's summand. Split-K partials are added up.

        With a fixed order the sum of the partials is rounded, as if the product had added them.
        """
        if not isinstance(x, SplitKPartials):
            return x
        if self.fixed_order:
            return x.total()
        first, *others = x.parts.unbind(0)
        return sum(others, first)

    def _sum_in_rank_order(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of x over all ranks, added in float32 and rounded once."""
        return _in_rank_order(self.all_gather(x).unbind(0), dtype)

    def norm(
        self,
        x_MC: LinearOutput,
        residual_MC: torch.Tensor,
        spec: ops.NormSpec | None,
        out: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        return ops.norm(self.all_reduce(x_MC), residual_MC, spec, out, branch)

    def begin_sum(self, x_MC: torch.Tensor) -> RowSum | None:
        """Return a sum over gloo. NCCL has none: a product of many rows takes all SMs, so NCCL's
        blocks would run before or after it and not at the same time.
        """
        return GatheredSum(x_MC, self.group) if self._gathers and self.overlaps else None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        gathered = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if self._gathers:
            dist.all_gather(list(gathered.unbind(0)), x, group=self.group)
        else:
            dist.all_gather_into_tensor(gathered.flatten(), x.flatten(), group=self.group)
        return gathered

    def row_boundaries(self, hidden_size: int, dtype: torch.dtype) -> list[int]:
        """Return an empty list: the process group uses no compiled kernels."""
        return []

    def check(self) -> None:
        """Do nothing: a process group raises errors itself."""

    def abort(self) -> None:
        """Do nothing: the owner of the process group ends it."""

    def close(self) -> None:
        """Do nothing: the owner of the process group ends it."""


class GatheredSum:
    """RowSum over gloo: the chunks of all ranks are gathered while later rows are computed."""

    def __init__(self, x_MC: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._x_MC, self._group = x_MC, group
        self._sent: list[tuple[dist.Work, list[torch.Tensor]]] = []

    def send(self, start: int, stop: int) -> None:
        chunk_MC = self._x_MC[start:stop].float()
        found = [torch.empty_like(chunk_MC) for _ in range(dist.get_world_size(self._group))]
        work = dist.all_gather(found, chunk_MC, group=self._group, async_op=True)
        self._sent.append((work, found))

    def total(self) -> torch.Tensor:
        sums = []
        for work, found in self._sent:
            work.wait()
            sums.append(_in_rank_order(found, self._x_MC.dtype))
        return torch.cat(sums)

    def norm(
        self,
        residual_MC: torch.Tensor | None,
        spec: ops.NormSpec | None,
        out: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        return ops.norm(self.total(), residual_MC, spec, out, branch)


def _in_rank_order(xs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the ranks' x, added in float32 and rounded once."""
    first, *others = xs
    return sum((each.float() for each in others), first.float()).to(dtype)
