"""Peer memory of processes on one host by CUDA IPC handles, through ctypes and CUDA's driver.

Buffers are allocated by the driver, because expandable segments of torch's allocator cannot be
exported. Multicast is not used. Ranks may share a GPU.
"""

import ctypes
import functools
import socket
import struct

import torch

from qkernels.collective.peer_memory import Exchange, PeerAccessError, PeerMemory, agreed

_LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


def open_peer_memory(
    rank: int, num_bytes: int, device: torch.device, exchange: Exchange
) -> PeerMemory:
    """Allocate a buffer on each rank that all ranks reach. Raises PeerAccessError on all or none.

    All ranks call it together. Its last exchange is a barrier: all buffers are initialized then.
    """
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # makes torch's context current in this thread
    hosts = agreed(exchange, lambda: _own_place(device))
    places = [struct.unpack("<q", each[:8]) + (each[8:],) for each in hosts]
    agreed(exchange, lambda: _check_places(rank, places))
    buffer = _Buffer(num_bytes, device)
    try:
        handles = agreed(exchange, buffer.allocate)
        agreed(exchange, lambda: buffer.open_peers(rank, handles))
    except PeerAccessError:
        buffer.close()
        raise
    return PeerMemory(
        rank=rank, own=buffer.tensor(), addresses=tuple(buffer.addresses), close=buffer.close
    )


def _own_place(device: torch.device) -> bytes:
    return struct.pack("<q", torch.cuda.current_device()) + socket.gethostname().encode()


def _check_places(rank: int, places: list[tuple[int, bytes]]) -> bytes:
    """Check that ranks are on one host with the same devices, which have peer access."""
    own, host = places[rank]
    for other, (index, other_host) in enumerate(places):
        if other_host != host:
            raise PeerAccessError(f"rank {other}", "is on another host", "use GPUs of one host")
        if index >= torch.cuda.device_count():
            raise PeerAccessError(
                f"rank {other}", "sees other devices", "set CUDA_VISIBLE_DEVICES alike for all"
            )
        if index != own and not torch.cuda.can_device_access_peer(own, index):
            raise PeerAccessError(
                f"GPU {own}",
                f"has no peer access to GPU {index} (rank {other})",
                "use GPUs with it: nvidia-smi topo -m",
            )
    return b""


class _Buffer:
    """One rank's own memory, and the other ranks' memory mapped into this process."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        self.pointer = ctypes.c_uint64(0)
        self.addresses: list[int] = []
        self.opened: list[int] = []

    def allocate(self) -> bytes:
        """Allocate memory with all bits set. Returns its IPC handle."""
        _call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(self.num_bytes))
        _call("cuMemsetD8_v2", self.pointer, ctypes.c_ubyte(255), ctypes.c_size_t(self.num_bytes))
        torch.cuda.synchronize(self.device)
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), self.pointer)
        return bytes(handle)

    def open_peers(self, rank: int, handles: list[bytes]) -> bytes:
        for other, data in enumerate(handles):
            if other == rank:
                self.addresses.append(self.pointer.value)
                continue
            handle = _Handle.from_buffer_copy(data[:_HANDLE_BYTES])
            pointer = ctypes.c_uint64(0)
            flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, flags)
            self.opened.append(pointer.value)
            self.addresses.append(pointer.value)
        return b""

    def tensor(self) -> torch.Tensor:
        """Return this rank's memory as a tensor, valid until `close`."""

        class Described:
            __cuda_array_interface__ = {
                "shape": (self.num_bytes,),
                "typestr": "|u1",
                "data": (self.pointer.value, False),
                "version": 2,
            }

        return torch.as_tensor(Described(), device=self.device)

    def close(self) -> None:
        """Unmap the other ranks' memory and free this rank's. No kernel may use either."""
        torch.cuda.synchronize(self.device)
        for pointer in self.opened:
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer))
        if self.pointer.value:
            _driver().cuMemFree_v2(self.pointer)
        self.opened, self.pointer = [], ctypes.c_uint64(0)


class ExportedMemory:
    """Device memory that processes outside of a rank group can open by its handle."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the memory. Raises PeerAccessError if CUDA refuses."""
        torch.cuda.synchronize(device)  # makes torch's context current in this thread
        self._buffer = _Buffer(num_bytes, device)
        try:
            self.handle = self._buffer.allocate()
        except PeerAccessError:
            self._buffer.close()
            raise

    @property
    def pointer(self) -> int:
        return self._buffer.pointer.value

    def tensor(self) -> torch.Tensor:
        """Return the memory as uint8, valid until `close`."""
        return self._buffer.tensor()

    def close(self) -> None:
        """Free the memory. No kernel may use it."""
        self._buffer.close()


def open_handle(handle: bytes, device: torch.device) -> int:
    """Map another process's memory for `device`. Returns its address. Raises PeerAccessError."""
    if len(handle) != _HANDLE_BYTES:
        raise PeerAccessError(
            "an IPC handle",
            f"has {len(handle)} bytes, not {_HANDLE_BYTES}",
            "run the same version on both sides",
        )
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    pointer = ctypes.c_uint64(0)
    flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
    found = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), found, flags)
    return pointer.value


def close_handle(address: int) -> None:
    """Unmap what `open_handle` mapped. No kernel may use it."""
    _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))


def copy_from(address: int, target: torch.Tensor) -> None:
    """Copy mapped memory to a contiguous tensor, in order of the current stream."""
    stream = torch.cuda.current_stream(target.device)
    _call(
        "cuMemcpyAsync",
        ctypes.c_uint64(target.data_ptr()),
        ctypes.c_uint64(address),
        ctypes.c_size_t(target.nbytes),
        ctypes.c_void_p(stream.cuda_stream),
    )


def copy_to(address: int, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Copy a contiguous tensor to mapped memory, in order of a stream.

    Between two GPUs a copy engine does it, without any SM.
    """
    _call(
        "cuMemcpyAsync",
        ctypes.c_uint64(address),
        ctypes.c_uint64(source.data_ptr()),
        ctypes.c_size_t(source.nbytes),
        ctypes.c_void_p(stream.cuda_stream),
    )


def register_host(tensor: torch.Tensor) -> None:
    """Pin host memory that other code allocated, so that the device can copy it asynchronously.

    Raises PeerAccessError. The driver is called directly, because CUDA's runtime would keep an
    error and raise it in a later call.
    """
    _call(
        "cuMemHostRegister_v2",
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_size_t(tensor.nbytes),
        ctypes.c_uint(0),
    )


def unregister_host(tensor: torch.Tensor) -> None:
    """Undo `register_host`. Raises PeerAccessError."""
    _call("cuMemHostUnregister", ctypes.c_void_p(tensor.data_ptr()))


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuIpcOpenMemHandle_v2.argtypes = [
        *(ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    ]
    return driver


def _call(name: str, *arguments: object) -> None:
    """Call a function of CUDA's driver. Raises PeerAccessError with the driver's error name."""
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(text))
        problem = (text.value or b"error").decode() + f" ({result})"
        raise PeerAccessError(f"CUDA's {name}", problem, "check the GPUs with nvidia-smi")
