"""PeerCommunicator: one-shot and two-shot all-reduce through peer memory, NCCL for the rest.

M: rows. C: hidden size.
"""

import logging

import torch
import torch.distributed as dist

from qkernels import ops
from qkernels.collective import cuda_ipc, symmetric_memory
from qkernels.collective import ops as collective
from qkernels.collective.channels import PeerLayout, Peers
from qkernels.collective.pair_sum import PairSum, takes_pair_sum
from qkernels.collective.peer_memory import PeerAccessError, PeerMemory, exchange_by
from qkernels.errors import KernelError
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.operands.split_k import LinearOutput
from qkernels.problem import FLOAT_DTYPES
from qkernels.warm_up import sum_boundaries
from qserve.parallel.communicator import RowSum
from qserve.parallel.row_chunks import MIN_ROWS
from qserve.parallel.torch_communicator import TorchCommunicator

MIB = 2**20

logger = logging.getLogger(__name__)


class PeerCommunicator(TorchCommunicator):
    """All-reduces through peer memory if the tensor fits; uses the process group otherwise.

    With a fixed order, larger tensors are divided into pieces that fit, because the peer-memory
    kernels add in rank order and NCCL does not. Norms are then separate kernels, because the fused
    all-reduce and norm adds a row's squares in an order that depends on the number of rows.
    """

    def __init__(
        self, group: dist.ProcessGroup, peers: Peers, *, fixed_order: bool = False
    ) -> None:
        super().__init__(group, fixed_order=fixed_order)
        self.peers = peers

    def all_reduce(self, x: LinearOutput) -> torch.Tensor:
        if self.fixed_order and x.dtype in FLOAT_DTYPES:
            return self._in_pieces(self.own_partial(x))
        if x.dtype in FLOAT_DTYPES and collective.all_reduce_algorithm(x, self.peers) is not None:
            return collective.all_reduce(x, self.peers)
        return super().all_reduce(x)

    def _in_pieces(self, x: torch.Tensor) -> torch.Tensor:
        if collective.all_reduce_algorithm(x, self.peers) is not None:
            return collective.all_reduce(x, self.peers)
        pieces = x.flatten().split(self.peers.layout.limits.two_shot // x.element_size())
        return torch.cat([collective.all_reduce(piece, self.peers) for piece in pieces]).view(
            x.shape
        )

    def norm(
        self,
        x_MC: LinearOutput,
        residual_MC: torch.Tensor,
        spec: ops.NormSpec | None,
        out: InputForm,
        branch: ops.Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        if self.fixed_order or not collective.fuses(x_MC, out, self.peers):
            return super().norm(x_MC, residual_MC, spec, out, branch)
        return collective.all_reduce_norm(x_MC, residual_MC, spec, self.peers, out, branch)

    def begin_sum(self, x_MC: torch.Tensor) -> RowSum | None:
        """Return a sum by copies between two ranks (pair_sum.py), if x fits into the buffer."""
        takes = self.overlaps and x_MC.dtype in FLOAT_DTYPES and takes_pair_sum(x_MC, self.peers)
        return PairSum(x_MC, self.peers) if takes else None

    def row_boundaries(self, hidden_size: int, dtype: torch.dtype) -> list[int]:
        found = sum_boundaries(self.peers.layout.limits, hidden_size, dtype.itemsize)
        return found if self.peers.pair is None else [*found, MIN_ROWS]

    def check(self) -> None:
        """Raise PeerLostError if an all-reduce timed out waiting for a rank."""
        self.peers.check()

    def abort(self) -> None:
        """Release kernels that wait for a dead rank. Thread-safe."""
        self.peers.abort()

    def close(self) -> None:
        self.peers.close()


def over_peer_memory(
    communicator: TorchCommunicator,
    hidden_size: int,
    device: torch.device,
    max_rows: int = 0,
    equal_shards: bool = False,
) -> TorchCommunicator:
    """Return a PeerCommunicator if all ranks have peer access, else `communicator`.

    `max_rows`: most rows of a step. `equal_shards`: see PeerLayout. Logs the choice.
    """
    pair_rows = max_rows if max_rows >= MIN_ROWS else 0
    try:
        layout = PeerLayout.of_model(
            communicator.size, hidden_size, pair_rows=pair_rows, equal_shards=equal_shards
        )
        memory = _open(communicator, layout.num_bytes, device)
    except KernelError as error:
        if communicator.rank == 0:
            logger.warning("All-reduce uses only NCCL: %s", error)
        return communicator
    if communicator.rank == 0:
        size = layout.num_bytes / MIB
        logger.info("All-reduce uses %.0f MiB of peer memory on each rank", size)
    return PeerCommunicator(
        communicator.group, Peers(memory, layout), fixed_order=communicator.fixed_order
    )


def _open(communicator: TorchCommunicator, num_bytes: int, device: torch.device) -> PeerMemory:
    """Open peer memory through IPC handles, or else through torch's symmetric memory.

    If neither works, raises PeerAccessError on all ranks.
    """
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
