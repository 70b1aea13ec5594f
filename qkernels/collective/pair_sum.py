"""Sum over two ranks whose rows are copied to the peer while later rows are computed.

A product that fills all SMs leaves no room for the blocks of an all-reduce. Here copy engines send
finished rows over the link and take no SM, so the copies run while the product computes its next
rows. At the end both ranks exchange one word by the one-shot kernel: a rank sends it after its
copies have ended, so a rank that has received it also has all rows of its peer.

Two phases of the buffer alternate. A rank copies to the phase of sum k again for sum k + 2. Then it
has received the word of sum k + 1, which the peer sent after the kernel that read sum k. A sum that
is never read does not change the phase: the next one overwrites it, in order of the same stream.

Each element is added in float32 in rank order and rounded once. So the bits equal those of the
other all-reduces of two ranks, whatever the division into chunks of rows.

Legend: M rows, C channels.
"""

import ctypes

import torch

from qkernels.collective import cuda_ipc
from qkernels.collective.channels import Peers
from qkernels.errors import KernelError
from qkernels.gpu.launch import launches_nothing
from qkernels.operands.forms import InputForm, LinearInput
from qkernels.rowwise.ops import norm
from qkernels.rowwise.spec import Branch, NormSpec


def takes_pair_sum(x_MC: torch.Tensor, peers: Peers) -> bool:
    """Return True if x can be summed by PairSum: two ranks, and x fits into the buffer."""
    return (
        peers.pair is not None
        and x_MC.nbytes <= peers.pair.message_bytes
        and not (x_MC.is_cuda and torch.cuda.is_current_stream_capturing())
    )


class PairSum:
    """The sum of contiguous x [M, C], which is written while the sum is under way.

    All ranks begin and read the same sums in the same order, on one stream. CUDA graphs cannot
    capture it, because the host counts the phases.
    """

    def __init__(self, x_MC: torch.Tensor, peers: Peers) -> None:
        if not takes_pair_sum(x_MC, peers) or not x_MC.is_contiguous():
            most = 0 if peers.pair is None else peers.pair.message_bytes
            raise KernelError(
                "pair sum x",
                f"expected a contiguous tensor of at most {most} bytes on two ranks, outside of"
                f" CUDA graphs, found {x_MC.nbytes} bytes on {peers.ranks} ranks",
                "call all_reduce",
            )
        self._x_MC, self._peers, self._channel = x_MC, peers, peers.pair
        self._phase = peers.pair.phase
        peers.pair.num_begun += 1
        self._number = peers.pair.num_begun
        self._received_MC: torch.Tensor | None = None  # set by received

    def send(self, start: int, stop: int) -> None:
        """Start to copy rows [start, stop) to the peer. They are complete in the current stream."""
        if launches_nothing():
            return
        channel, rows = self._channel, self._x_MC[start:stop]
        offset = self._phase * channel.message_bytes + start * self._x_MC[0].nbytes
        if channel.stream is None:
            ctypes.memmove(channel.peer_address + offset, rows.data_ptr(), rows.nbytes)
            return
        channel.stream.wait_stream(torch.cuda.current_stream(rows.device))
        cuda_ipc.copy_to(channel.peer_address + offset, rows, channel.stream)

    def received(self) -> torch.Tensor:
        """Return the peer's x. Kernels in the current stream find it complete.

        It is valid until the next sum but one begins.
        """
        channel = self._channel
        if channel.num_begun != self._number:
            raise KernelError(
                "pair sum",
                "another sum was begun before this one was read",
                "read a sum before the next product over ranks",
            )
        if self._received_MC is None:
            from qkernels.collective import one_shot  # imports triton

            if channel.stream is not None:
                torch.cuda.current_stream(self._x_MC.device).wait_stream(channel.stream)
            one_shot.all_reduce(channel.token, self._peers)
            if not launches_nothing():
                channel.phase = 1 - self._phase
            region = channel.received[self._phase, : self._x_MC.nbytes]
            self._received_MC = region.view(self._x_MC.dtype).view(self._x_MC.shape)
        return self._received_MC

    def total(self) -> torch.Tensor:
        """Return the sum as a new tensor."""
        terms = self._x_MC, self.received()
        first, second = terms if self._peers.rank == 0 else terms[::-1]
        return first + second

    def norm(
        self,
        residual_MC: torch.Tensor | None,
        spec: NormSpec | None,
        out: InputForm,
        branch: Branch,
    ) -> tuple[LinearInput, torch.Tensor]:
        """Return ops.norm of the sum."""
        if residual_MC is None:
            return norm(self.total(), None, spec, out, branch)
        return norm(self._x_MC, residual_MC, spec, out, branch, addend=self.received())
