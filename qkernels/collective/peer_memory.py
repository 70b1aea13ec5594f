"""Peer memory, one buffer per rank that all ranks write: its interface, and a version for CPUs.

GPU ranks use cuda_ipc.py or symmetric_memory.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qkernels.errors import KernelError

# Sends a rank's message to all ranks and returns all messages by rank. All ranks call it together.
Exchange = Callable[[bytes], list[bytes]]


class PeerAccessError(KernelError):
    """The ranks cannot write into each other's memory. All ranks raise it."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """Peer memory of one rank. All bits of every buffer are set before any rank receives it."""

    rank: int
    own: torch.Tensor  # uint8
    addresses: tuple[int, ...]  # address of every rank's buffer in this process
    keeps: object = None  # owners of the memory, kept alive
    close: Callable[[], None] = field(default=_nothing)

    @property
    def ranks(self) -> int:
        return len(self.addresses)


def shared_files(rank: int, num_bytes: int, folder: Path, exchange: Exchange) -> PeerMemory:
    """Open peer memory of CPU processes, over files that all of them map."""
    paths = [Path(each.decode()) for each in exchange(str(folder / f"rank{rank}").encode())]
    paths[rank].write_bytes(b"\xff" * num_bytes)
    exchange(b"")
    buffers = [
        torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths
    ]
    return PeerMemory(
        rank=rank,
        own=buffers[rank],
        addresses=tuple(buffer.data_ptr() for buffer in buffers),
        keeps=buffers,
    )


def exchange_by(group: "torch.distributed.ProcessGroup") -> Exchange:
    """Make an exchange over a torch process group of any backend."""
    import torch.distributed as dist

    on_cpu = "gloo" in dist.get_backend(group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def gathered(own: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        return [each.cpu() for each in found]

    def exchange(message: bytes) -> list[bytes]:
        own = torch.tensor(list(message), dtype=torch.uint8, device=device)
        lengths = gathered(torch.tensor([len(message)], device=device))
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(message)] = own
        found = gathered(padded)
        return [
            bytes(each[: int(length)].tolist()) for each, length in zip(found, lengths, strict=True)
        ]

    return exchange


def agreed(exchange: Exchange, work: Callable[[], bytes]) -> list[bytes]:
    """Run `work` on every rank and return all results.

    Raises PeerAccessError on all ranks if one failed.
    """
    try:
        message = b"+" + work()
    except (OSError, AttributeError, RuntimeError, KernelError) as error:
        message = b"-" + str(error).encode()
    answers = exchange(message)
    for other, answer in enumerate(answers):
        if answer[:1] != b"+":
            reason = answer[1:].decode(errors="replace")
            raise PeerAccessError(f"peer memory of rank {other}", reason, "use NCCL")
    return [answer[1:] for answer in answers]
