"""The Communicator over torch.distributed: gloo on CPUs, NCCL on GPUs."""

import torch
import torch.distributed as dist

from qkernels import ops
from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput, SplitKPartials

# Sums of fewer bytes than this travel in float32, so that they are rounded once, as on one GPU:
# there it is latency that counts. Longer ones travel in the activations' dtype.
FLOAT32_BYTES = 2**20


class TorchCommunicator:
    """What a process group gives. The plain form of every operation."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._gathers = dist.get_backend(group) == "gloo"

    def all_reduce(self, x: LinearOutput) -> torch.Tensor:
        if isinstance(x, SplitKPartials):
            first, *others = x.parts.unbind(0)
            partial = sum(others, first)
        else:
            partial = x
        if self._gathers:
            # gloo's own order of addition is not documented.
            first, *others = self.all_gather(partial.float()).unbind(0)
            return sum(others, first).to(x.dtype)
        few = partial.numel() * torch.float32.itemsize <= FLOAT32_BYTES
        dtype = torch.float32 if few else x.dtype
        # torch reduces in place: what others still read must not change.
        summed = partial.to(dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed.to(x.dtype)

    def add_rms_norm_into(
        self,
        x_MC: LinearOutput,
        residual_MC: torch.Tensor,
        weight_C: torch.Tensor | None,
        eps: float,
        form: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        summed_MC = self.all_reduce(x_MC)
        return ops.add_rms_norm_into(summed_MC, residual_MC, weight_C, eps, form, branch)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        gathered = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if self._gathers:
            dist.all_gather(list(gathered.unbind(0)), x, group=self.group)
        else:
            dist.all_gather_into_tensor(gathered.flatten(), x.flatten(), group=self.group)
        return gathered

    def row_boundaries(self, hidden_size: int, dtype: torch.dtype) -> list[int]:
        """None: the group has no kernels that are compiled."""
        return []

    def check(self) -> None:
        """A process group raises by itself."""

    def abort(self) -> None:
        """The group's owner ends it."""

    def close(self) -> None:
        """The group's owner ends it."""
