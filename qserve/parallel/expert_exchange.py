"""ExpertExchange: communication of engines that share the experts of one model (DP attention).

Each engine has its own requests and KV pages, some of the experts, and the rest of the model. In a
layer with experts each engine gathers the rows of all engines, computes its experts for these rows,
and gets the sums for its own rows back. So all engines must run their steps together.

A sequence of such steps is a wave. An engine with work calls the others; the wave ends with a step
in which no engine has tokens.

n: engines. T: own rows. M: rows of all engines. C: hidden size.
"""

import contextlib
import datetime
import hashlib
import threading
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from formats.errors import InputError

FLAG = "--data-parallel-address"
FILE, TCP = "file://", "tcp://"
CLOSE_SECONDS = 5.0
DIGEST_DIGITS = 15  # hexadecimal digits of a digest that `counts` sends as one number: 60 bits
TIMEOUT = datetime.timedelta(seconds=1800)  # longest wait of one engine for another


class EngineConnection(Protocol):
    """Connection of an engine to the others."""

    rank: int
    size: int

    def counts(self, count: int) -> list[int]:
        """Send one number; return the numbers of all engines, in rank order."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of all engines, [n, *x.shape]. All shapes must be equal."""

    def all_to_all(self, x_n: torch.Tensor) -> torch.Tensor:
        """Send x[r] to engine r. Returns what each engine has sent here: [n, ...]."""

    def call(self, wave: int) -> None:
        """Ask the other engines to join a wave."""

    def is_called(self, wave: int) -> bool:
        """Return True if an engine has asked the others to join this wave."""


class ExpertExchange:
    """Lets one engine take part in the steps of all engines."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self.rank, self.size = connection.rank, connection.size
        self.is_in_wave = False
        self._wave = 0  # number of the current or next wave
        self._counts: list[int] | None = None  # rows of each engine in this step; None: a warm-up

    @property
    def is_wanted(self) -> bool:
        """True if other engines run steps, or are about to, and need this engine."""
        return self.is_in_wave or self._connection.is_called(self._wave)

    def digest_of_all(self, digest: str) -> str:
        """Return one digest of all engines' hexadecimal digests. All engines must call this."""
        number = int(digest[:DIGEST_DIGITS], 16)
        return hashlib.sha256(str(self._connection.counts(number)).encode()).hexdigest()

    def begin(self, num_tokens: int) -> bool:
        """Agree with the other engines on the next step.

        Returns False if no engine has tokens, which ends the wave.
        """
        if not self.is_in_wave:
            self.is_in_wave = True
            self._connection.call(self._wave)
        self._counts = self._connection.counts(num_tokens)
        if any(self._counts):
            return True
        self._counts, self.is_in_wave = None, False
        self._wave += 1
        return False

    def gather(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Return the rows of all engines, [M, C]."""
        if self._counts is None:  # a warm-up of this engine alone: repeat its own rows
            return x_TC.repeat(self.size, 1)
        padded = self._padded(x_TC)
        found = self._connection.all_gather(padded)
        return torch.cat([rows[:count] for rows, count in zip(found, self._counts, strict=True)])

    def scatter(self, x_MC: torch.Tensor) -> torch.Tensor:
        """Return the sums over all engines for the own rows, [T, C].

        The sums are added in float32 in rank order.
        """
        if self._counts is None:
            return x_MC[: len(x_MC) // self.size]
        parts = torch.stack([self._padded(part) for part in x_MC.split(self._counts)])
        first, *others = self._connection.all_to_all(parts)[:, : self._counts[self.rank]].unbind(0)
        return sum((each.float() for each in others), first.float()).to(x_MC.dtype)

    def _padded(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Pad rows with zeros to the maximum number of rows of any engine."""
        most = max(self._counts)
        padded = x_TC.new_zeros(most, *x_TC.shape[1:])
        padded[: len(x_TC)] = x_TC
        return padded


class TorchEngineConnection:
    """Connection over torch.distributed: NCCL for GPU tensors, gloo for everything else."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self._store = rank, size, dist.PrefixStore("waves", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("experts", store),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
        self._group = dist.group.WORLD
        # a separate gloo group, so that sending token counts does not wait for the GPU
        is_host = backend == "gloo"
        self._hosts = self._group if is_host else dist.new_group(backend="gloo", timeout=TIMEOUT)

    def counts(self, count: int) -> list[int]:
        found = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([count]), group=self._hosts)
        return [int(each) for each in found]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(found.unbind(0)), x.contiguous(), group=self._group)
        return found

    def all_to_all(self, x_n: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(x_n)
        dist.all_to_all_single(found, x_n, group=self._group)
        return found

    def call(self, wave: int) -> None:
        self._store.set(str(wave), "called")

    def is_called(self, wave: int) -> bool:
        return self._store.check([str(wave)])


def join_experts(address: str, rank: int, size: int, device: torch.device) -> ExpertExchange:
    """Join the other engines at an address: file:///PATH or tcp://HOST:PORT. Raises InputError."""
    return ExpertExchange(TorchEngineConnection(_store(address, rank, size), rank, size, device))


def _store(address: str, rank: int, size: int) -> dist.Store:
    if address.startswith(FILE):
        return dist.FileStore(str(Path(address.removeprefix(FILE))), size)
    host, _, port = address.removeprefix(TCP).rpartition(":")
    if not (address.startswith(TCP) and host and port.isdecimal()):
        raise InputError(
            FLAG,
            f"expected file:///PATH or tcp://HOST:PORT, found {address!r}",
            "for example tcp://10.0.0.1:5700",
        )
    try:
        return dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=TIMEOUT)
    except RuntimeError as error:
        raise InputError(
            FLAG,
            f"{address} cannot be reached: {error!s:.200}",
            "start all engines with the same address, one of this network",
        ) from error


def leave(exchange: ExpertExchange | None) -> None:
    """Leave the other engines if this process has joined them. Does not wait for a dead engine."""
    if exchange is None or not dist.is_initialized():
        return
    thread = threading.Thread(target=_destroy, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)


def _destroy() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
