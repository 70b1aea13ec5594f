"""Peer memory of ranks that are one process, or are forked from it."""

import torch

from qkernels.collective.peer_memory import PeerMemory


def virtual_ranks(ranks: int, num_bytes: int, device: torch.device) -> list[PeerMemory]:
    """Memory of ranks on one device; on a CPU processes that are forked later share it."""
    sized = {"dtype": torch.uint8, "device": device}
    buffers = [torch.full((num_bytes,), 255, **sized) for _ in range(ranks)]
    if device.type == "cpu":
        buffers = [buffer.share_memory_() for buffer in buffers]
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    return [
        PeerMemory(rank=rank, own=own, addresses=addresses, keeps=buffers)
        for rank, own in enumerate(buffers)
    ]
