"""Ranks as threads of one process, and their Communicator: for tests of what ranks compute."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from qkernels import ops
from qkernels.operands.split_k import reduced

WAIT_SECONDS = 60  # a guard against hanging, never reached


class ThreadGroup:
    """Where `size` threads exchange tensors."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.places = [None] * size

    def exchange(self, rank, x):
        self.places[rank] = x
        self.barrier.wait(WAIT_SECONDS)
        found = list(self.places)
        self.barrier.wait(WAIT_SECONDS)
        return found


class ThreadCommunicator:
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def all_reduce(self, x):
        x = reduced(x)
        parts = self.meeting.exchange(self.rank, x.float())
        assert len({part.shape for part in parts}) == 1
        return sum(parts[1:], parts[0]).to(x.dtype)

    def norm(self, x, residual, spec, out, branch):
        return ops.norm(self.all_reduce(x), residual, spec, out, branch)

    def begin_sum(self, x):
        return None

    def all_gather(self, x):
        return torch.stack(self.meeting.exchange(self.rank, x))

    def row_boundaries(self, hidden_size, dtype):
        return []

    def check(self):
        pass

    def abort(self):
        self.meeting.barrier.abort()

    def close(self):
        pass


def run_ranks(size, work):
    """work(communicator) in a thread for each rank. Returns their results in rank order."""
    meeting = ThreadGroup(size)

    def one(rank):
        try:
            with torch.inference_mode():
                return work(ThreadCommunicator(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [future.exception() for future in futures if future.exception() is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
