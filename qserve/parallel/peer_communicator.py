"""The Communicator over peer memory: one-shot and two-shot sums in kernels, NCCL for the rest.

Legend: n ranks, M rows, C hidden size.
"""

import logging

import torch
import torch.distributed as dist

from qkernels.collective import cuda_ipc, symmetric_memory
from qkernels.collective import ops as collective
from qkernels.collective.channels import PeerLayout, Peers
from qkernels.collective.peer_memory import PeerAccessError, PeerMemory, exchange_by
from qkernels.errors import KernelError
from qkernels.linear.plan import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput
from qkernels.problem import FLOAT_DTYPES
from qkernels.rowwise.branch import Branch
from qkernels.warm_up import sum_boundaries
from qserve.parallel.torch_communicator import TorchCommunicator

MIB = 2**20

logger = logging.getLogger(__name__)


class PeerCommunicator(TorchCommunicator):
    """Sums through peer memory where they fit; all else as its process group does it."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        super().__init__(group)
        self.peers = peers

    def all_reduce(self, x: LinearOutput) -> torch.Tensor:
        fits = x.dtype in FLOAT_DTYPES and collective.way_to_reduce(x, self.peers) is not None
        return collective.all_reduce(x, self.peers) if fits else super().all_reduce(x)

    def add_rms_norm_into(
        self,
        x_MC: LinearOutput,
        residual_MC: torch.Tensor,
        weight_C: torch.Tensor | None,
        eps: float,
        form: InputForm,
        branch: Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        if not collective.fuses(x_MC, form, self.peers):
            return super().add_rms_norm_into(x_MC, residual_MC, weight_C, eps, form, branch)
        return collective.all_reduce_add_rms_norm_into(
            x_MC, residual_MC, weight_C, eps, form, self.peers, branch
        )

    def row_boundaries(self, hidden_size: int, dtype: torch.dtype) -> list[int]:
        return sum_boundaries(self.peers.layout.limits, hidden_size, dtype.itemsize)

    def check(self) -> None:
        """Raise PeerLostError if a sum waited for a rank in vain."""
        self.peers.check()

    def abort(self) -> None:
        """Let kernels that wait for a rank that is gone go on. Callable from any thread."""
        self.peers.abort()

    def close(self) -> None:
        self.peers.close()


def over_peer_memory(
    communicator: TorchCommunicator, hidden_size: int, device: torch.device
) -> TorchCommunicator:
    """With peer memory where all ranks have it, else as it was; one line of log says which."""
    try:
        layout = PeerLayout.of_model(communicator.size, hidden_size)
        memory = _open(communicator, layout.num_bytes, device)
    except KernelError as error:
        if communicator.rank == 0:
            logger.warning("All-reduce by NCCL alone: %s", error)
        return communicator
    if communicator.rank == 0:
        size = layout.num_bytes / MIB
        logger.info("All-reduce through %.0f MiB of peer memory on each rank", size)
    return PeerCommunicator(communicator.group, Peers(memory, layout))


def _open(communicator: TorchCommunicator, num_bytes: int, device: torch.device) -> PeerMemory:
    """By IPC handles, or else by torch's symmetric memory. Raises PeerAccessError on all ranks."""
    place = communicator.rank, num_bytes, device, exchange_by(communicator.group)
    try:
        return cuda_ipc.open_peer_memory(*place)
    except PeerAccessError as refused:
        logger.debug("No peer memory by IPC handles: %s", refused)
        try:
            return symmetric_memory.open_peer_memory(*place, communicator.group)
        except PeerAccessError as error:
            logger.debug("No peer memory by torch's symmetric memory: %s", error)
            raise refused from error
