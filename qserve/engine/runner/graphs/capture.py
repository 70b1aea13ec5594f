"""CUDA graph capture in a process with other threads."""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: object = None) -> Iterator[None]:
    """torch.cuda.graph, protected against other threads and garbage collection.

    - Other threads may call CUDA, which the default capture mode forbids: NCCL's own threads, and
      those that read adapters and KV pages into pinned memory.
    - This thread may not. Garbage collection could do so by freeing graphs and pinned memory of an
      earlier engine, so it is disabled.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
