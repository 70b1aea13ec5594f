"""Peer memory of processes on one host by torch's symmetric memory, if IPC handles are refused.

It needs a GPU per rank. Multicast stays off, since it is not needed and not every host has it.
"""

import os

import torch

from qkernels.collective.peer_memory import Exchange, PeerMemory, agreed

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # torch's own switch


def open_peer_memory(
    rank: int,
    num_bytes: int,
    device: torch.device,
    exchange: Exchange,
    group: "torch.distributed.ProcessGroup",
) -> PeerMemory:
    """Open peer memory like cuda_ipc.open_peer_memory, for a group that has a store."""
    addresses: list[int] = []
    kept: list[object] = []

    def work() -> bytes:
        os.environ[_NO_MULTICAST] = "1"
        import torch.distributed._symmetric_memory as symmetric

        torch.cuda.set_device(device)
        buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group.group_name)
        buffer.fill_(255)
        torch.cuda.synchronize(device)
        addresses.extend(handle.buffer_ptrs)
        kept.extend((buffer, handle))
        return b""

    agreed(exchange, work)
    return PeerMemory(rank=rank, own=kept[0], addresses=tuple(addresses), keeps=kept)
