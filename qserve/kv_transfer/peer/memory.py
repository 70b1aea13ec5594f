"""Memory of a transfer buffer: an in-memory file, or GPU memory with a CUDA IPC handle."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG
from qserve.kv_transfer.peer.layout import BufferFacts

BYTES_SUFFIX = ".bytes"


def bytes_path(index: Path) -> Path:
    """Return the path of the in-memory file of a buffer. `index`: path of its index file."""
    return index.with_name(index.name + BYTES_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferMemory:
    """Memory of this rank's buffer, valid until `close`."""

    bytes_X: torch.Tensor  # uint8
    device: str
    handle: str
    address: int
    close: Callable[[], None]


def allocate(path: Path, num_bytes: int, device: torch.device) -> BufferMemory:
    """Allocate a buffer that other processes can read. Raises InputError.

    `path`: path of the in-memory file, used on a CPU.
    """
    if device.type != "cuda":
        return _file_of(path, num_bytes)
    from qkernels.collective.cuda_ipc import ExportedMemory
    from qkernels.collective.peer_memory import PeerAccessError

    try:
        memory = ExportedMemory(num_bytes, device)
    except PeerAccessError as error:
        raise InputError(
            f"{FLAG} buffer_gb",
            f"{num_bytes / 2**30:.2f} GiB of GPU memory cannot be shared: {error}",
            "lower --gpu-memory-utilization or buffer_gb",
        ) from error
    return BufferMemory(
        bytes_X=memory.tensor(),
        device=str(torch.cuda.get_device_properties(device).uuid),
        handle=memory.handle.hex(),
        address=memory.pointer,
        close=memory.close,
    )


class TransferError(RuntimeError):
    """The memory of another engine cannot be read."""


class SlotMemory(Protocol):
    """Another rank's buffer."""

    def read(
        self, numbers: Sequence[int], slot: int, count: int
    ) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Read the tensors `numbers` of `count` slots from `slot` on.

        Yields (tensor number, slice of these slots, their contents). The contents are valid until
        the next one is yielded; on a GPU their copies run on the current stream. Raises
        RuntimeError.
        """

    def close(self) -> None:
        """Release the memory. No copy may still use it."""


class PeerMemory:
    """Another rank's buffer, mapped into this process."""

    def __init__(self, path: Path, facts: BufferFacts, device: torch.device) -> None:
        """`path`: path of the index file. Raises OSError, PeerAccessError or InputError."""
        self._facts, self._device, self._offsets = facts, device, facts.offsets
        self._close: Callable[[], None] = lambda: None
        self._bytes_X: torch.Tensor | None = None
        if (facts.device == "cpu") != (device.type == "cpu"):
            raise InputError(
                f"KV peer {facts.engine}",
                f"its pages are on {facts.device}, this engine's on {device}",
                "run both on GPUs or both on CPUs",
            )
        if device.type == "cpu":
            file = bytes_path(path)
            if file.stat().st_size != self._offsets[-1]:
                raise InputError(
                    str(file),
                    f"expected {self._offsets[-1]} bytes, found {file.stat().st_size}",
                    "remove the file, and start both engines again",
                )
            self._bytes_X = torch.from_file(str(file), True, self._offsets[-1], dtype=torch.uint8)
            return
        self._address = facts.address
        if facts.process != os.getpid():
            from qkernels.collective.cuda_ipc import close_handle, open_handle

            self._address = opened = open_handle(bytes.fromhex(facts.handle), device)
            self._close = lambda: close_handle(opened)

    def read(
        self, numbers: Sequence[int], slot: int, count: int
    ) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Read tensors of `count` slots from `slot` on; each is [count, ...] on this device."""
        for number in numbers:
            tensor = self._facts.tensors[number]
            start = self._offsets[number] + slot * tensor.num_bytes
            size = count * tensor.num_bytes
            if self._bytes_X is not None:
                found = self._bytes_X[start : start + size]
            else:
                from qkernels.collective.cuda_ipc import copy_from

                found = torch.empty(size, dtype=torch.uint8, device=self._device)
                copy_from(self._address + start, found)
            yield number, slice(0, count), tensor.view(found)

    def close(self) -> None:
        """Unmap the memory. No copy may still use it."""
        self._bytes_X = None
        self._close()


def _file_of(path: Path, num_bytes: int) -> BufferMemory:
    try:
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        bytes_X = torch.from_file(str(path), True, num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise InputError(
            f"{FLAG} buffer_gb",
            f"{num_bytes / 2**30:.2f} GiB do not fit in {path.parent}: {error}",
            "lower buffer_gb, or make the file system larger (in a container: --shm-size)",
        ) from error
    return BufferMemory(
        bytes_X=bytes_X,
        device="cpu",
        handle="",
        address=ctypes.c_void_p(bytes_X.data_ptr()).value or 0,
        close=lambda: path.unlink(missing_ok=True),
    )
