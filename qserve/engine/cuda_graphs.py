"""Steps as CUDA graphs: one launch in place of hundreds. Knows tensors, not the plan.

A step runs in the graph of the next larger size. There are two kinds: R requests with one token
each, and T tokens of any requests, for prompts short enough that Python would take longer to launch
their kernels than the GPU to run them. What a graph holds beyond the step is padding: tokens with
slot -1, requests with no rows and no keys. Graphs read their inputs from fixed buffers and share
one memory pool.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from qserve.engine.batch import Batch

logger = logging.getLogger(__name__)

PADDING_SLOT = -1
# The first token of an 8B in W4A16 on an H200 comes after 17.6 / 20.4 ms in graphs, of 768 / 1000
# tokens. Launching a step takes Python 22 to 23 ms, whatever its size (32 layers; measured with 8).
# Beyond, kernels take longer than that, 45 ms for 2048 tokens: a graph would only add padding.
CHUNK_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FEW_REQUESTS = 8  # of a chunk step


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture: 1, 2, 4, then multiples of 8 up to 64, of 32 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one graph holds: so many requests with a token each, or so many tokens of any."""

    is_chunk: bool
    num_tokens: int
    num_requests: int


def graph_kinds(max_num_seqs: int, max_num_tokens: int) -> list[Kind]:
    """All kinds to capture, the smallest first.

    Chunks come twice: a request that is not there costs attention blocks and rows of the head.
    """
    decodes = [
        Kind(is_chunk=False, num_tokens=size, num_requests=size)
        for size in graph_sizes(max_num_seqs)
    ]
    chunks = {
        Kind(is_chunk=True, num_tokens=size, num_requests=min(requests, size, max_num_seqs))
        for size in CHUNK_SIZES
        if size <= max_num_tokens
        for requests in (FEW_REQUESTS, max_num_seqs)
    }
    return sorted([*decodes, *chunks], key=lambda kind: (kind.num_tokens, kind.num_requests))


def smallest_kind(
    kinds: list[Kind], is_chunk: bool, num_tokens: int, num_requests: int
) -> Kind | None:
    """The first of `kinds` that holds a step, or None."""
    for kind in kinds:
        fits = kind.num_tokens >= num_tokens and kind.num_requests >= num_requests
        if fits and kind.is_chunk == is_chunk:
            return kind
    return None


class StepGraphs:
    """Captured steps, by kind and number of tokens."""

    def __init__(
        self,
        step: Callable[[Batch], torch.Tensor],
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """Capture `step`, which maps a batch to logits [S, V], for every size. Takes seconds."""
        self.device = device
        self._kinds = graph_kinds(max_num_seqs, max_num_tokens)
        longest = self._kinds[-1].num_tokens
        width = -(-max_model_len // page_size)

        def buffer(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        # filled with what stands for padding
        self._tokens = {
            "token_ids_T": buffer(longest),
            "positions_T": buffer(longest),
            "slots_T": buffer(longest, value=PADDING_SLOT),
        }
        self._requests = {
            "block_tables_RX": buffer(max_num_seqs, width, dtype=torch.int32),
            "context_lengths_R": buffer(max_num_seqs, dtype=torch.int32),
        }
        self._starts = buffer(max_num_seqs + 1, dtype=torch.int32)
        self._logits_rows = buffer(max_num_seqs)
        # both, where each request has one token
        self._decode_rows = torch.arange(max_num_seqs + 1, device=device)
        self._decode_starts = self._decode_rows.to(torch.int32)
        self._max_context_len = width * page_size
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        started = time.perf_counter()
        self._capture(step)
        logger.info("Capturing CUDA graphs took %.1f s", time.perf_counter() - started)

    def _batch(self, kind: Kind) -> Batch:
        starts = self._starts if kind.is_chunk else self._decode_starts
        rows = self._logits_rows if kind.is_chunk else self._decode_rows
        return Batch(
            **{name: tensor[: kind.num_tokens] for name, tensor in self._tokens.items()},
            **{name: tensor[: kind.num_requests] for name, tensor in self._requests.items()},
            query_starts_R1=starts[: kind.num_requests + 1],
            logits_rows_S=rows[: kind.num_requests],
            max_query_len=kind.num_tokens if kind.is_chunk else 1,
            max_context_len=self._max_context_len,
        )

    def _capture(self, step: Callable[[Batch], torch.Tensor]) -> None:
        # The largest first: the smaller ones then fit into its memory.
        pool = None
        for kind in tqdm(self._kinds[::-1], desc="Capturing CUDA graphs"):
            batch = self._batch(kind)
            step(batch)  # compiles kernels, which a capture may not
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits_SV = step(batch)
            pool = pool or graph.pool()
            self._graphs[kind] = graph, logits_SV

    def kind_for(self, arrays: dict[str, np.ndarray], max_query_len: int) -> Kind | None:
        """The smallest graph that holds a step, or None."""
        num_tokens, num_requests = len(arrays["token_ids_T"]), len(arrays["context_lengths_R"])
        return smallest_kind(self._kinds, max_query_len > 1, num_tokens, num_requests)

    def fill_(self, kind: Kind, arrays: dict[str, np.ndarray]) -> torch.Tensor:
        """Copy a step into the buffers. Returns that of the token ids."""
        for name, buffer in self._tokens.items():
            padding = PADDING_SLOT if buffer is self._tokens["slots_T"] else 0
            self._copy(buffer, _padded(arrays[name], kind.num_tokens, padding))
        lengths = arrays["context_lengths_R"]
        self._copy(self._requests["context_lengths_R"], _padded(lengths, kind.num_requests, 0))
        # Columns beyond a request's pages are never read, nor rows beyond the requests.
        tables = arrays["block_tables_RX"]
        self._copy(self._requests["block_tables_RX"][:, : tables.shape[1]], tables)
        if kind.is_chunk:
            starts, rows = arrays["query_starts_R1"], arrays["logits_rows_S"]
            self._copy(self._starts, _padded(starts, kind.num_requests + 1, starts[-1]))
            self._copy(self._logits_rows, _padded(rows, kind.num_requests, 0))
        return self._tokens["token_ids_T"]

    def _copy(self, buffer: torch.Tensor, array: np.ndarray) -> None:
        buffer[: len(array)].copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def replay(self, kind: Kind) -> torch.Tensor:
        """Run the graph on the buffers. Logits [S, V], valid until the next replay.

        A row for each request of a decode step, for each entry of logits_rows_S of another; rows
        beyond are padding.
        """
        graph, logits_SV = self._graphs[kind]
        graph.replay()
        return logits_SV


def _padded(array: np.ndarray, size: int, value: int) -> np.ndarray:
    padded = np.full(size, value, array.dtype)
    padded[: len(array)] = array
    return padded
