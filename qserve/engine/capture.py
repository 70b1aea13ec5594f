"""Capture of a CUDA graph in a process that does other things meanwhile."""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: object = None) -> Iterator[None]:
    """As torch.cuda.graph, and neither other threads nor freed memory end the capture.

    - Other threads may call CUDA, which a capture of all threads forbids: NCCL's own, those that
      read adapters and KV pages into pinned memory.
    - This thread may not. Garbage collected now could: an engine of before frees graphs and pinned
      memory. So none is.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
