"""Memory of the host for weights that leave a GPU, reused by every sleep and update.

Pinning 1 GiB takes 0.3 s, and the first write to 1 GiB of ordinary memory 0.4 s; a copy of 1 GiB
from a GPU to pinned memory that exists takes 0.02 s (H200). So what was pinned stays.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

CHUNK_BYTES = 2**28  # allocated at a time; torch rounds sizes of pinned memory to powers of two
ALIGNMENT = 512
PAGE_BYTES = 4096
LARGE_BYTES = 2**24  # of a tensor whose memory is touched by threads
NUM_THREADS = 8


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to ordinary memory of the host, contiguous.

    Threads touch the new memory of a large one first: one thread takes longer for it than the copy.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.device.type == "cuda" and tensor.nbytes >= LARGE_BYTES:
        content = copy.flatten().view(torch.uint8)
        parts = content.split(-(-len(content) // NUM_THREADS))
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(lambda part: part[::PAGE_BYTES].zero_(), parts))
    return copy.copy_(tensor)


class HostMemory:
    """Chunks of pinned memory, handed out piece by piece until `reset`."""

    def __init__(self, *, pinned: bool = True) -> None:
        """`pinned`: False where there is no GPU."""
        self._pinned = pinned
        self._chunks: list[torch.Tensor] = []
        self._used: list[int] = []  # bytes of each chunk

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def reset(self) -> None:
        """Take back all pieces. Their contents are lost with the next `take`."""
        self._used = [0] * len(self._chunks)

    def take(self, size: int) -> torch.Tensor:
        """Return uninitialized bytes. Raises torch's error where the host has no room."""
        for number, chunk in enumerate(self._chunks):
            if self._used[number] + size <= chunk.nbytes:
                break
        else:
            number, chunk = len(self._chunks), self._allocated(max(size, CHUNK_BYTES))
            self._chunks.append(chunk)
            self._used.append(0)
        start = self._used[number]
        self._used[number] += -(-size // ALIGNMENT) * ALIGNMENT
        return chunk[start : start + size]

    def _allocated(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
