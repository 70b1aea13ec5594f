"""The ranks of one model: who they are, and the process groups that connect them.

Knows torch.distributed, no model. Legend: a stage is a run of layers, held by as many ranks as each
layer is shared out over; rank = stage * tensor_parallel_size + place in the stage.
"""

import contextlib
import datetime
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from formats.errors import InputError
from qserve.parallel.communicator import Communicator
from qserve.parallel.pipeline import Pipeline
from qserve.parallel.torch_communicator import TorchCommunicator

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
TIMEOUT = datetime.timedelta(seconds=1800)  # that a rank waits for another, whatever it does
CLOSE_SECONDS = 10.0
LOOK_SECONDS = 0.02  # between two looks for who is there
FILE = "file://"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Our rank among those of a model."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None  # of our stage; None: it has no other rank
    pipeline: Pipeline | None = None  # None: there is one stage

    @property
    def are_many(self) -> bool:
        return self.size > 1

    def close(self) -> None:
        """Leave the group."""
        if self.communicator is not None:
            self.communicator.close()
        if self.are_many and dist.is_initialized():
            # NCCL may wait for ranks that are gone; nobody is to wait for that.
            thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
            thread.start()
            thread.join(CLOSE_SECONDS)

    def abort(self) -> None:
        """Let a GPU that waits for a rank that is gone go on. Callable from any thread."""
        if not dist.is_initialized() or dist.get_backend() != "nccl":
            return  # gloo sees by itself that a connection is closed
        if self.communicator is not None:
            self.communicator.abort()
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()


ALONE = Ranks()


def join(
    address: str,
    rank: int,
    *,
    tensor_parallel_size: int,
    stages: int,
    device: torch.device,
    all_reduce: str = "auto",
    hidden_size: int = 0,
    check: Callable[[], None] = lambda: None,
) -> Ranks:
    """Meet the other ranks at an address that torch.distributed knows: tcp:// or file://.

    `all_reduce`: "nccl" keeps peer memory from being used. `hidden_size`: of rows that are summed.
    `check`: raises where one of the others will not come; rank 0 asks while it waits for them.

    Raises InputError where this process is one of several ranks already.
    """
    size = tensor_parallel_size * stages
    if dist.is_initialized():
        raise InputError(
            "--tensor-parallel-size",
            "this process has a torch.distributed group already, of another engine or its own",
            "close that engine first, or start this one in a process of its own",
        )
    meeting: dict[str, Any] = {"init_method": address}
    if address.startswith(FILE):
        # All ranks are on this machine. A host name that does not resolve would stop gloo.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(address.removeprefix(FILE), size)
        _wait_for_all(store, rank, size, check)
        meeting = {"store": store}
    backend = BACKENDS[device.type]
    options = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(
        backend,
        **meeting,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        **options,
    )
    stage, place = divmod(rank, tensor_parallel_size)
    groups = [dist.group.WORLD]
    if stages > 1:  # every rank makes every group, also those that it is not in
        firsts = range(0, size, tensor_parallel_size)
        groups = [
            dist.new_group(list(range(first, first + tensor_parallel_size)), TIMEOUT)
            for first in firsts
        ]
    communicator = None
    if tensor_parallel_size > 1:
        communicator = TorchCommunicator(groups[stage])
        # NCCL connects at the first call, which may not be one that a graph captures.
        communicator.all_reduce(torch.zeros(1, device=device))
        if backend == "nccl" and all_reduce == "auto":
            from qserve.parallel.peer_communicator import over_peer_memory  # loads triton's rows

            communicator = over_peer_memory(communicator, hidden_size, device)
    pipeline = None
    if stages > 1:
        ahead, back = (dist.new_group(list(range(size)), TIMEOUT) for _ in range(2))
        pipeline = Pipeline(
            stage=stage,
            num_stages=stages,
            ranks=tuple(s * tensor_parallel_size + place for s in range(stages)),
            ahead=ahead,
            back=back,
        )
        pipeline.connect(device)
    return Ranks(rank=rank, size=size, communicator=communicator, pipeline=pipeline)


def _wait_for_all(store: dist.Store, rank: int, size: int, check: Callable[[], None]) -> None:
    """Let rank 0 wait until the others are there: a process group waits, and cannot be stopped."""
    store.set(f"rank {rank}", "is here")
    others = [f"rank {other}" for other in range(size)]
    while rank == 0 and not store.check(others):
        check()
        time.sleep(LOOK_SECONDS)
