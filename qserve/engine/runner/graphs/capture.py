"""CUDA graph capture in a process with other threads."""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: object = None) -> Iterator[None]:
    """Capture with torch.cuda.graph while other threads may call CUDA.

    - Other threads may call CUDA, which the default capture mode forbids: NCCL's threads, and
      threads that read adapters and KV pages into pinned memory.
    - This thread must not call CUDA. Garbage collection could call it, by freeing graphs and pinned
      memory of an earlier engine, so garbage collection is disabled.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
