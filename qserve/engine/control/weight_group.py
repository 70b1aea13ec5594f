"""WeightGroup: a process group in which a trainer, rank 0, broadcasts tensors to engines.

NCCL sends between GPUs, also across hosts; gloo sends through host memory. The group is separate
from torch's default group and is built from public classes. It uses the same store keys as torch's
own groups, so a trainer may join with the helpers of SGLang, verl and OpenRLHF. Nothing is pickled.
"""

import math
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from formats.errors import InputError
from qserve.engine.control.commands import BroadcastWeights, JoinWeightGroup
from qserve.engine.control.shared_tensors import DTYPES

NCCL, GLOO = "nccl", "gloo"
KEYS = {NCCL: "cuda/", GLOO: "cpu/"}  # torch's store prefix for each backend
MAX_ELEMENTS = 2**40


class WeightGroup:
    """One member of the group. Rank 0 is the trainer, which also hosts the store."""

    def __init__(self, command: JoinWeightGroup, rank: int, device: torch.device) -> None:
        """Join the group, and wait for the other members. Raises InputError."""
        self.name, self.backend = command.name, command.backend
        self._where = f"{command.address}:{command.port}"
        if command.backend not in KEYS:
            raise InputError(
                "backend",
                f"expected nccl or gloo, found {command.backend!r:.40}",
                "use gloo, or nccl on GPUs",
            )
        if command.backend == NCCL and device.type != "cuda":
            raise InputError("backend nccl", f"does not work on a {device.type}", "use gloo")
        if not 0 <= rank < command.world_size or command.world_size < 2:
            raise InputError(
                "rank_offset",
                f"expected 1 to {command.world_size - 1}, found {rank}",
                "give each engine its own rank; the trainer has rank 0",
            )
        self._device = device if command.backend == NCCL else torch.device("cpu")
        timeout = timedelta(seconds=command.timeout)
        try:
            self._store = dist.TCPStore(
                command.address,
                command.port,
                command.world_size,
                is_master=rank == 0,
                timeout=timeout,
            )
            self._group = self._join(rank, command.world_size, timeout)
        except (RuntimeError, ValueError) as error:
            raise self._failed("cannot be joined", error) from None

    def receive(self, weights: BroadcastWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the trainer broadcasts, in its order. Raises InputError."""
        names, dtypes, shapes = weights.names, weights.dtypes, weights.shapes
        if not len(names) == len(dtypes) == len(shapes):
            raise InputError(
                "names, dtypes, shapes",
                f"expected as many of each, found {len(names)}, {len(dtypes)}, {len(shapes)}",
                "send a name, a dtype and a shape for each tensor",
            )
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            known = DTYPES.get(dtype.removeprefix("torch."))
            if known is None:
                raise InputError(
                    f"tensor {name:.200}",
                    f"has the unknown dtype {dtype!r:.40}",
                    f"known: {', '.join(DTYPES)}",
                )
            if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
                raise InputError(
                    f"tensor {name:.200}",
                    f"has the shape {shape!s:.80}",
                    "send the shape of the model's tensor",
                )
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            known = DTYPES[dtype.removeprefix("torch.")]
            yield name, self.broadcast(torch.empty(shape, dtype=known, device=self._device))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send a contiguous tensor from rank 0, or receive into it. Raises InputError."""
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise self._failed("broke", error) from None
        return tensor

    def _join(self, rank: int, world_size: int, timeout: timedelta) -> "dist.ProcessGroup":
        store = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        store = dist.PrefixStore(KEYS[self.backend], store)
        if self.backend == GLOO:
            return dist.ProcessGroupGloo(store, rank, world_size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # torch has no public attribute for it
        torch.cuda.set_device(self._device)
        return dist.ProcessGroupNCCL(store, rank, world_size, options)

    def _failed(self, problem: str, error: Exception) -> InputError:
        text = str(error).partition("\n")[0]
        return InputError(
            f"weight group {self.name:.80} at {self._where}",
            f"{problem}: {text:.300}",
            "start the trainer's side at the same time, with the same world size",
        )
