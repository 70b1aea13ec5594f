"""Decode steps as CUDA graphs: one launch in place of hundreds. Knows tensors, not the plan.

A step of R requests with one token each runs in the graph of the next larger size. The rows beyond
R are padding: slot -1, no keys. Graphs read their inputs from fixed buffers and share one memory
pool.
"""

import logging
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from tqdm import tqdm

from qserve.engine.batch import Batch
from qserve.engine.transfer import to_device

logger = logging.getLogger(__name__)

PADDING_SLOT = -1
# name -> value of a padding row; query_starts_R1 and logits_rows_S never change
INPUTS = {
    "token_ids_T": 0,
    "positions_T": 0,
    "slots_T": PADDING_SLOT,
    "block_tables_RX": 0,
    "context_lengths_R": 0,
}


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture: 1, 2, 4, then multiples of 8 up to 64, of 32 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Captured decode steps, by number of rows."""

    def __init__(
        self,
        step: Callable[[Batch], torch.Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """Capture `step`, which maps a batch to logits [S, V], for every size. Takes seconds."""
        self.device = device
        width = -(-max_model_len // page_size)
        shapes = dict.fromkeys(INPUTS, (max_num_seqs,))
        shapes["block_tables_RX"] = (max_num_seqs, width)
        int32 = ("block_tables_RX", "context_lengths_R")
        self._inputs = {
            name: torch.full(
                shapes[name],
                padding,
                dtype=torch.int32 if name in int32 else torch.int64,
                device=device,
            )
            for name, padding in INPUTS.items()
        }
        self._rows = torch.arange(max_num_seqs + 1, device=device)
        self._starts = self._rows.to(torch.int32)
        self._max_context_len = width * page_size
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        started = time.perf_counter()
        self._capture(step, tqdm(graph_sizes(max_num_seqs)[::-1], desc="Capturing CUDA graphs"))
        logger.info("Capturing CUDA graphs took %.1f s", time.perf_counter() - started)

    def _batch(self, size: int) -> Batch:
        inputs = {name: tensor[:size] for name, tensor in self._inputs.items()}
        return Batch(
            **inputs,
            query_starts_R1=self._starts[: size + 1],
            logits_rows_S=self._rows[:size],
            max_query_len=1,
            max_context_len=self._max_context_len,
        )

    def _capture(self, step: Callable[[Batch], torch.Tensor], sizes: Iterable[int]) -> None:
        # The largest first: the smaller ones then fit into its memory.
        pool = None
        for size in sizes:
            batch = self._batch(size)
            step(batch)  # compiles kernels, which a capture may not
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits_SV = step(batch)
            pool = pool or graph.pool()
            self._graphs[size] = graph, logits_SV

    def inputs(self, arrays: dict[str, np.ndarray]) -> tuple[int, dict[str, torch.Tensor]]:
        """Copy a decode step into the buffers. Returns the graph's size and the buffers."""
        count = len(arrays["token_ids_T"])
        size = next(size for size in sorted(self._graphs) if size >= count)
        for name, padding in INPUTS.items():
            array, buffer = arrays[name], self._inputs[name]
            if array.ndim == 2:
                # Columns beyond a request's pages are never read.
                buffer[:count, : array.shape[1]].copy_(
                    to_device(array, self.device), non_blocking=True
                )
                continue
            padded = np.full(size, padding, array.dtype)
            padded[:count] = array
            buffer[:size].copy_(to_device(padded, self.device), non_blocking=True)
        return size, self._inputs

    def replay(self, size: int, count: int) -> torch.Tensor:
        """Run the graph on the buffers. Logits [count, V], valid until the next replay."""
        graph, logits_SV = self._graphs[size]
        graph.replay()
        return logits_SV[:count]
