"""Non-blocking copies between host and device."""

from collections import deque
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch


def on_host(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a host tensor. For a GPU it is pinned, so that copies overlap with computation."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`. The copy may still be in progress."""
    return on_host(array, device).to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copy int64 arrays in one transfer, each aligned to 16 bytes.

    They are aligned because Triton compiles other kernels for unaligned addresses.
    """
    lengths = [len(array) for array in arrays]
    sizes = [length + length % 2 for length in lengths]
    packed = np.zeros(sum(sizes), np.int64)
    for part, array in zip(np.split(packed, np.cumsum(sizes)[:-1]), arrays, strict=True):
        part[: len(array)] = array
    parts = to_device(packed, device).split(sizes)
    return tuple(part[:length] for part, length in zip(parts, lengths, strict=True))


class HostCopy:
    """A copy of a device tensor to the host, in progress. `wait()` blocks until it is complete."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.clone()  # the source may be overwritten before `wait`

    @classmethod
    def under_way(cls, host: torch.Tensor, event: torch.cuda.Event) -> "HostCopy":
        """Wrap pinned memory whose contents are complete once the event has passed."""
        found = cls.__new__(cls)
        found._host, found._event = host, event
        return found

    def part(self, start: int, stop: int) -> "HostCopy":
        """Return the copy of rows [start, stop)."""
        part = copy(self)
        part._host = self._host[start:stop]
        return part

    def wait(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


class PinnedCopies:
    """Makes the small copies of every step. On a GPU kernels copy (qkernels/gpu/pinned.py)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Keeps pinned memory alive: the allocator does not track kernels that use it.
        self._in_use: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def send_(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Copy int64 words to the start of a device tensor."""
        host = on_host(array, self._device)
        if self._device.type == "cuda":
            self._copy(target, host, host)
        else:
            target[: len(host)].copy_(host, non_blocking=True)

    def fetch(self, words: torch.Tensor) -> HostCopy:
        """Copy int64 words to the host."""
        if self._device.type != "cuda":
            return HostCopy(words)
        host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        return HostCopy.under_way(host, self._copy(host, words, host))

    def _copy(self, to: torch.Tensor, source: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        from qkernels.gpu.pinned import copy_words_  # imports triton, which a CPU may lack

        copy_words_(to, source)
        event = torch.cuda.Event()
        event.record()
        self._in_use.append((host, event))
        while self._in_use and self._in_use[0][1].query():
            self._in_use.popleft()
        return event
