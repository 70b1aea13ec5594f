"""Ranks: this process's rank of a model, and the process groups that connect the ranks.

A pipeline stage has tensor_parallel_size ranks: rank = stage * tensor_parallel_size + index in the
stage. With context parallelism there is one stage and several equal sets of ranks: rank = set *
tensor_parallel_size + index in the set.
"""

import contextlib
import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from formats.errors import InputError
from qserve.parallel.communicator import Communicator
from qserve.parallel.expert_exchange import ExpertExchange
from qserve.parallel.expert_placement import ExpertPlacement
from qserve.parallel.pipeline import Pipeline
from qserve.parallel.torch_communicator import TorchCommunicator

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
TIMEOUT = datetime.timedelta(seconds=1800)  # longest wait of one rank for another
CLOSE_SECONDS = 10.0
LOOK_SECONDS = 0.02  # interval at which rank 0 checks for the others
FILE = "file://"

# Two threads that abort or destroy process groups at the same time corrupt the heap.
_ENDING = threading.Lock()
_ABORTING = threading.Lock()  # held by the thread that aborts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's rank among the ranks of a model, and its connections."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None  # ranks of this stage; None: one rank
    pipeline: Pipeline | None = None  # None: one stage
    # ranks with the same shard, which divide long prompts; None: no context parallelism
    context: Communicator | None = None
    experts: ExpertPlacement | None = None  # None: each rank has a slice of every expert
    exchange: ExpertExchange | None = None  # engines that share the experts; None: no other

    @property
    def are_many(self) -> bool:
        return self.size > 1

    def leave(self) -> None:
        """Destroy the process groups. All ranks must call this while all of them still run.

        CUDA graphs that contain NCCL operations must be freed first: ncclCommFinalize waits for
        them.
        """
        if not self.are_many or not dist.is_initialized():
            return
        thread = threading.Thread(target=_destroy_process_groups, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            logger.warning("Rank %d: the process group did not close", self.rank)

    def close(self) -> None:
        """Free peer memory and a failed process group. Call after all other ranks have exited."""
        if self.communicator is not None:
            self.communicator.close()
        self.abort()
        self.leave()

    def abort(self) -> None:
        """Stop NCCL kernels that wait for a rank that has exited. Thread-safe.

        Does not wait: NCCL ends an abort only when the CUDA graphs that contain its operations have
        been freed, which the caller may do next. `leave` waits for it.
        """
        if not dist.is_initialized() or dist.get_backend() != "nccl":
            return  # gloo notices a closed connection itself
        if self.communicator is not None:
            self.communicator.abort()
        threading.Thread(target=_abort_process_groups, daemon=True).start()


def _abort_process_groups() -> None:
    if not _ABORTING.acquire(blocking=False):
        return  # another thread does it
    # A `leave` that waits for the rank that has exited is aborted all the same.
    is_ours = _ENDING.acquire(timeout=CLOSE_SECONDS)
    try:
        if dist.is_initialized():  # no other thread has ended them
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
    finally:
        if is_ours:
            _ENDING.release()
        _ABORTING.release()


def _destroy_process_groups() -> None:
    with _ENDING:
        if dist.is_initialized():  # no other thread has aborted them
            dist.destroy_process_group()


ALONE = Ranks()


def join(
    address: str,
    rank: int,
    *,
    tensor_parallel_size: int,
    stages: int,
    contexts: int = 1,
    device: torch.device,
    all_reduce: str = "auto",
    hidden_size: int = 0,
    max_rows: int = 0,
    equal_shards: bool = False,
    fixed_order: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Ranks:
    """Join the other ranks at a torch.distributed address: tcp:// or file://.

    `contexts`: number of sets of ranks that divide long prompts; if over 1, `stages` must be 1.
    `all_reduce`: "nccl" disables peer memory. `hidden_size`: columns of the tensors to all-reduce.
    `max_rows`: most rows of them. `equal_shards`: all ranks' shards of a linear have the same
    shape. `fixed_order`: the sum of a row must not depend on the number of
    rows. `check`: called by rank 0 while it waits for the others; raises an error if a rank has
    died.

    Raises InputError if this process already has a process group.
    """
    sets = stages * contexts
    size = tensor_parallel_size * sets
    if dist.is_initialized():
        raise InputError(
            "--tensor-parallel-size",
            "this process already has a torch.distributed group, of another engine or its own",
            "close that engine first, or start this one in its own process",
        )
    _meet(address, rank, size, device, check)
    number, place = divmod(rank, tensor_parallel_size)
    groups = [dist.group.WORLD]
    if sets > 1:
        firsts = range(0, size, tensor_parallel_size)
        groups = _new_groups([range(first, first + tensor_parallel_size) for first in firsts])
    communicator = None
    if tensor_parallel_size > 1:
        communicator = TorchCommunicator(groups[number], fixed_order=fixed_order)
        # NCCL connects at the first call, which must not be inside a graph capture.
        communicator.all_reduce(torch.zeros(1, device=device))
        if device.type == "cuda" and all_reduce == "auto":
            from qserve.parallel.peer_communicator import over_peer_memory  # imports triton

            communicator = over_peer_memory(
                communicator, hidden_size, device, max_rows, equal_shards
            )
    context = None
    if contexts > 1:
        places = range(tensor_parallel_size)
        alike = _new_groups([range(each, size, tensor_parallel_size) for each in places])
        context = TorchCommunicator(alike[place])
        context.all_gather(torch.zeros(1, device=device))
    pipeline = None
    if stages > 1:
        ahead, back = _new_groups([range(size)] * 2)
        pipeline = Pipeline(
            stage=number,
            num_stages=stages,
            ranks=tuple(s * tensor_parallel_size + place for s in range(stages)),
            ahead=ahead,
            back=back,
        )
        pipeline.connect(device)
    return Ranks(
        rank=rank, size=size, communicator=communicator, pipeline=pipeline, context=context
    )


def _meet(
    address: str, rank: int, size: int, device: torch.device, check: Callable[[], None]
) -> None:
    """Create the process group of all ranks."""
    meeting: dict[str, Any] = {"init_method": address}
    if address.startswith(FILE):
        # All ranks are on this machine. Without this, gloo fails if the host name does not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(address.removeprefix(FILE), size)
        _wait_for_all(store, rank, size, check)
        meeting = {"store": store}
    options = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        BACKENDS[device.type], **meeting, rank=rank, world_size=size, timeout=TIMEOUT, **options
    )


def _new_groups(members: Sequence[Iterable[int]]) -> list[dist.ProcessGroup]:
    """Create a process group of each set of ranks.

    Every rank must create every group, including those that it is not in.
    """
    return [dist.new_group(list(ranks), TIMEOUT) for ranks in members]


def _wait_for_all(store: dist.Store, rank: int, size: int, check: Callable[[], None]) -> None:
    """On rank 0, wait for the others, since a wait in a process group cannot be interrupted."""
    store.set(f"rank {rank}", "is here")
    others = [f"rank {other}" for other in range(size)]
    while rank == 0 and not store.check(others):
        check()
        time.sleep(LOOK_SECONDS)
