"""Agent: one rank's NIXL agent. It registers memory and reads the memory of other agents."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from formats.errors import InputError, one_line
from qserve.kv_transfer.config import FLAG
from qserve.kv_transfer.peer.memory import TransferError

READ_SECONDS = 10.0  # timeout of a read
SPINS = 20  # number of polls of a read before the thread sleeps between polls
SLEEP_SECONDS = 0.00005

logger = logging.getLogger(__name__)


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Address of registered memory, as readers need it."""

    address: int
    kind: str  # DRAM or VRAM
    device: int  # number of the GPU in its process; 0 on a CPU


@dataclass(slots=True, kw_only=True, eq=False)
class Buffer:
    """Registered memory of this process."""

    bytes_X: torch.Tensor  # uint8
    region: Region
    close: Callable[[], None]
    is_lost: bool = False  # True: a read that timed out may still write to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A range of bytes that a read copies."""

    target: int  # offset in the local buffer
    source: int  # offset in the remote region
    size: int


class Agent(Protocol):
    """The NIXL operations that the connector uses. Only one thread at a time may call a method."""

    @property
    def metadata(self) -> bytes:
        """Data with which other agents reach this agent and its registered memory."""

    def allocate(self, num_bytes: int, device: torch.device) -> Buffer:
        """Allocate memory and register it. Raises InputError."""

    def release(self, buffer: Buffer) -> None:
        """Free a buffer. If a read may still write to it, it is freed when the agent closes."""

    def add(self, metadata: bytes) -> str:
        """Add another agent. Returns its name. Raises TransferError."""

    def remove(self, name: str) -> None:
        """Remove another agent."""

    def read(self, name: str, source: Region, target: Buffer, parts: Sequence[Part]) -> None:
        """Copy parts of another agent's region to a local buffer, and wait until they arrive.

        Raises TransferError.
        """

    def close(self) -> None:
        """Shut the agent down."""


class NixlAgent:
    """The agent of the package `nixl`."""

    def __init__(self, name: str, backend: str) -> None:
        """`name`: must be unique among all agents. Raises InputError."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise InputError(
                f"{FLAG} nixl",
                f"needs the package nixl: {one_line(error)}",
                "pip install 'qserve-kit[nixl]'",
            ) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # NIXL logs each start at INFO
        try:
            self._agent: Any = nixl_agent(name, nixl_agent_config(backends=[backend]))
        except Exception as error:  # NIXL's exceptions have no common base class
            raise InputError(
                f"{FLAG} nixl",
                f"cannot start: {_text(error)}",
                "choose another backend, or the connector peer, which needs no NIXL",
            ) from error
        if backend not in self._agent.backends:
            raise InputError(
                f"{FLAG} backend",
                f"NIXL has no backend {backend}",
                f"use one of {', '.join(sorted(self._agent.get_plugin_list()))}",
            )
        self._backend = backend
        self._lost: list[object] = []  # buffers and handles of reads that timed out

    @property
    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def allocate(self, num_bytes: int, device: torch.device) -> Buffer:
        bytes_X, free = _memory(num_bytes, device)
        number = (device.index or 0) if device.type == "cuda" else 0
        kind = "VRAM" if device.type == "cuda" else "DRAM"
        region = Region(address=bytes_X.data_ptr(), kind=kind, device=number)
        row = (region.address, num_bytes, number, "")
        try:
            registered = self._agent.register_memory([row], kind, [self._backend])
        except Exception as error:
            free()
            raise InputError(
                f"{FLAG} nixl",
                f"{num_bytes / 2**30:.2f} GiB on {device} cannot be registered: {_text(error)}",
                "lower buffer_gb, or use another backend",
            ) from error

        def close() -> None:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registered, [self._backend])
            free()

        return Buffer(bytes_X=bytes_X, region=region, close=close)

    def release(self, buffer: Buffer) -> None:
        if buffer.is_lost:
            self._lost.append(buffer)
        else:
            buffer.close()

    def add(self, metadata: bytes) -> str:
        try:
            return self._agent.add_remote_agent(metadata).decode()
        except Exception as error:
            raise TransferError(f"NIXL cannot reach it: {_text(error)}") from error

    def remove(self, name: str) -> None:
        with contextlib.suppress(Exception):  # the other agent may be gone
            self._agent.remove_remote_agent(name)

    def read(self, name: str, source: Region, target: Buffer, parts: Sequence[Part]) -> None:
        ours, agent = target.region, self._agent
        rows = [(ours.address + part.target, part.size, ours.device) for part in parts]
        theirs = [(source.address + part.source, part.size, source.device) for part in parts]
        until, spins, handle, state = time.monotonic() + READ_SECONDS, 0, None, ""
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(rows, ours.kind),
                agent.get_xfer_descs(theirs, source.kind),
                name,
                backends=[self._backend],
            )
            state = agent.transfer(handle)
            while state == "PROC":
                spins += 1
                if spins > SPINS:
                    time.sleep(SLEEP_SECONDS)
                    if time.monotonic() > until:
                        raise TransferError(f"a read did not end within {READ_SECONDS:g} s")
                state = agent.check_xfer_state(handle)
            handle.release()
        except Exception as error:
            if state == "PROC":
                target.is_lost = True
                self._lost.append(handle)
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"NIXL: {_text(error)}") from error
        if state != "DONE":
            raise TransferError(f"NIXL: a read ended with the state {state}")

    def close(self) -> None:
        self._lost.clear()
        del self._agent


def _memory(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """Allocate memory that can be registered. Raises InputError."""
    if device.type != "cuda":
        try:
            return torch.empty(num_bytes, dtype=torch.uint8), lambda: None
        except RuntimeError as error:
            raise _no_room(num_bytes, device, error) from error
    # torch's allocator is not used, because its memory may be mapped in pieces
    from qkernels.collective.cuda_ipc import ExportedMemory
    from qkernels.collective.peer_memory import PeerAccessError

    try:
        memory = ExportedMemory(num_bytes, device)
    except PeerAccessError as error:
        raise _no_room(num_bytes, device, error) from error
    return memory.tensor(), memory.close


def _no_room(num_bytes: int, device: torch.device, error: Exception) -> InputError:
    return InputError(
        f"{FLAG} buffer_gb",
        f"{num_bytes / 2**30:.2f} GiB on {device} cannot be allocated: {one_line(error)}",
        "lower buffer_gb or --gpu-memory-utilization",
    )


def _text(error: Exception) -> str:
    return one_line(error) or type(error).__name__
