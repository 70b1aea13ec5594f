"""Copies between host and device that do not wait. Knows arrays, not their meaning."""

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch


def on_host(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on the host; for a GPU in pinned memory, so that a copy overlaps with work there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on `device`, which may still be on its way there."""
    return on_host(array, device).to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arrays of int64 in one transfer."""
    packed = to_device(np.concatenate(arrays), device)
    return packed.split([len(array) for array in arrays])


class HostCopy:
    """A device tensor on its way to the host. `wait()` blocks until it has arrived."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.clone()  # its place may be written to again before it is read

    def part(self, start: int, stop: int) -> "HostCopy":
        """Some of a copied tensor's rows."""
        part = copy(self)
        part._host = self._host[start:stop]
        return part

    def wait(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host
