"""Ranks for tests: on a CPU processes forked from the test, on a GPU streams of one process."""

import multiprocessing
import traceback
from collections.abc import Callable

import torch

from qkernels.collective.channels import PeerLayout, Peers
from qkernels.collective.config import KIB, Limits
from tests.qkernels.conftest import ON_GPU
from tests.qkernels.virtual_ranks import virtual_ranks

LIMITS = Limits(one_shot=64 * KIB, two_shot=128 * KIB, rows=8)
CHANNELS = 2176  # 3 blocks share a row, the last has 128 channels
PAIR_ROWS = 40  # rows of a sum by copies
GIVE_UP_AFTER = 10**8 if ON_GPU else 10**6  # looks: minutes, for a guard
SECONDS = 300

Work = Callable[[Peers], list[torch.Tensor]]


def results_of_ranks(
    ranks: int,
    work: Work,
    device: torch.device,
    spin_limit: int = GIVE_UP_AFTER,
    absent: tuple[int, ...] = (),
    equal_shards: bool = True,
) -> list[list[torch.Tensor]]:
    """Return the results of `work` on each rank, on the CPU; [] for absent ranks. Raises errors."""
    layout = PeerLayout.of_model(ranks, CHANNELS, LIMITS, PAIR_ROWS, equal_shards)
    memories = virtual_ranks(ranks, layout.num_bytes, device)
    peers = [Peers(memory, layout, spin_limit) for memory in memories]
    if ON_GPU:
        return _on_streams(peers, work, layout, device, absent)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in peers]
    processes = [
        context.Process(target=_child, args=(work, own, pipe[1]), daemon=True)
        for own, pipe in zip(peers, pipes, strict=True)
        if own.rank not in absent
    ]
    for process in processes:
        process.start()
    found: list[list[torch.Tensor]] = []
    try:
        for rank, (pipe, _) in enumerate(pipes):
            if rank in absent:
                found.append([])
                continue
            assert pipe.poll(SECONDS), f"rank {rank} does not answer"
            answer = pipe.recv()
            if isinstance(answer, str):
                raise AssertionError(f"rank {rank}: {answer}")
            found.append([_tensor(*each) for each in answer])
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _child(work: Work, peers: Peers, pipe) -> None:
    torch.set_num_threads(1)
    try:
        results = work(peers)
        peers.check()
        pipe.send([_plain(each) for each in results])
    except Exception:
        pipe.send(traceback.format_exc())


def _plain(x: torch.Tensor) -> tuple:
    return x.dtype, list(x.shape), x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: torch.dtype, shape: list[int], data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def _on_streams(
    peers: list[Peers], work: Work, layout: PeerLayout, device: torch.device, absent: tuple
) -> list[list[torch.Tensor]]:
    """Run ranks on streams. First each rank compiles its kernels, because loading one may wait."""
    for memory in virtual_ranks(len(peers), layout.num_bytes, device):
        work(Peers(memory, layout, spin_limit=0))
    torch.cuda.synchronize()
    found = []
    for own in peers:
        if own.rank in absent:
            found.append([])
            continue
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found.append(work(own))
    torch.cuda.synchronize()
    for own in peers:
        own.check()
    return [[each.cpu() for each in results] for results in found]
