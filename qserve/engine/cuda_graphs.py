"""Steps as CUDA graphs: one launch in place of hundreds. Knows tensors, no requests.

A step runs in the graph of the next larger size. There are two sorts: R requests with one token
each, and T tokens of any requests, for prompts short enough that Python would take longer to launch
their kernels than the GPU to run them. What a graph holds beyond the step is padding: tokens with
slot -1, requests with no rows and no keys. Graphs read their inputs from fixed places
(step_buffers.py) and share one memory pool.

A start captures few: the largest, which take the pool's memory, and the smallest, which the first
request runs in. The others are captured while the engine is idle, or when a step first needs them.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from qserve.engine.batch import Batch
from qserve.engine.capture import capture
from qserve.engine.out_of_memory import ran_out
from qserve.engine.step_buffers import GraphKey, StepBuffers
from qserve.engine.step_input import StepInput, table_width
from qserve.engine.step_outputs import StepOutputs

logger = logging.getLogger(__name__)

# The first token of an 8B in W4A16 on an H200 comes after 17.6 / 20.4 ms in graphs, of 768 / 1000
# tokens. Launching a step takes Python 22 to 23 ms, whatever its size (32 layers; measured with 8).
# Beyond, kernels take longer than that, 45 ms for 2048 tokens: a graph would only add padding.
# Prompts are often powers of two, and decodes run beside them: up to 64 find room in the next size.
CHUNK_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 576, 768, 1024, 1088)
FEW_REQUESTS = 8  # of a chunk step


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether a capture failed for want of memory. Its end may raise an error of its own on top."""
    while isinstance(error, RuntimeError | MemoryError):
        if ran_out(error):
            return True
        error = error.__context__
    return False


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture: 1, 2, 4, then multiples of 8 up to 64, of 32 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def graph_keys(
    max_num_seqs: int,
    max_num_tokens: int,
    counts: Collection[int] = (1,),
    max_rows: int = 0,
    with_adapters: bool = False,
) -> list[GraphKey]:
    """What to capture, the smallest first.

    `counts`: tokens that each request of a decode may have: 1, and more with drafts, of which there
    are at most `max_rows` together. Chunks come twice: a request that is not there costs attention
    blocks and rows of the head. `with_adapters`: all come again, for steps that have some.
    """
    most = max(max_num_seqs, max_rows)  # of a chunk's rows that sample
    decodes = [
        GraphKey(is_chunk=False, num_tokens=size * count, num_requests=size)
        for count in counts
        for size in graph_sizes(max_num_seqs)
        if count == 1 or size * count <= min(max_rows, max_num_tokens)
    ]
    chunks = {
        GraphKey(is_chunk=True, num_tokens=size, num_requests=min(requests, size, most))
        for size in CHUNK_SIZES
        if size <= max_num_tokens
        for requests in (FEW_REQUESTS, most)
    }
    keys = [*decodes, *chunks]
    if with_adapters:
        keys += [replace(key, has_adapters=True) for key in keys]
    return sorted(keys, key=lambda key: (key.num_tokens, key.num_requests, key.has_adapters))


def graph_rows(keys: Collection[GraphKey]) -> dict[str, list[int]]:
    """How many tokens graphs compute, of decodes with one each and of chunks, ascending."""
    chunks = {key.num_tokens for key in keys if key.is_chunk}
    decodes = {k.num_tokens for k in keys if not k.is_chunk and k.num_tokens == k.num_requests}
    return {"decode": sorted(decodes), "chunk": sorted(chunks)}


def smallest_key(keys: list[GraphKey], step: StepInput) -> GraphKey | None:
    """The first of `keys` that holds a step, or None."""
    count, has_adapters = step.rows_each, step.adapter_slots_T is not None
    is_chunk = count == 0 or not any(key.count == count for key in keys if not key.is_chunk)
    # a chunk graph has as many rows of logits as requests
    num_rows = max(step.num_requests, step.num_sampled) if is_chunk else step.num_requests
    for key in keys:
        fits = key.num_tokens >= step.num_tokens and key.num_requests >= num_rows
        if key.has_adapters != has_adapters:
            continue
        if fits and key.is_chunk == is_chunk and (is_chunk or key.count == count):
            return key
    return None


def first_keys(keys: list[GraphKey]) -> list[GraphKey]:
    """What a start captures, the largest first: the smaller ones then fit into its memory."""
    sorts: dict[tuple[int, bool], list[GraphKey]] = {}
    for key in keys:
        sort = 0 if key.is_chunk else key.count, key.has_adapters
        sorts.setdefault(sort, []).append(key)
    ends = [key for of_sort in sorts.values() for key in (of_sort[0], of_sort[-1])]
    return sorted(set(ends), key=keys.index, reverse=True)


class StepGraphs:
    """Captured steps, by key."""

    def __init__(
        self,
        step: Callable[[Batch], StepOutputs],
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_context_len: int,
        page_size: int,
        device: torch.device,
        in_step: bool = False,
        counts: Collection[int] = (1,),
        max_rows: int = 0,
        with_adapters: bool = False,
        with_states: bool = False,
    ) -> None:
        """Graphs of `step`. Captures the first of them. `counts`, `max_rows`: as graph_keys.

        Steps with a longer context than `max_context_len` run in none. `in_step`: other ranks
        capture and replay the same graphs in the same order, and wait for ours.
        """
        self.in_step = in_step
        self._step = step
        self._device = device
        self._keys = graph_keys(max_num_seqs, max_num_tokens, counts, max_rows, with_adapters)
        width = -(-max_context_len // page_size)
        self._max_context_len = width * page_size
        most = max(key.num_requests for key in self._keys)
        self._table_width = table_width(width)
        self._buffers = StepBuffers(self._keys, most, self._table_width, device, with_states)
        self._batches: dict[GraphKey, Batch] = {}
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, StepOutputs]] = {}
        self._pool: tuple[int, int] | None = None
        for key in first_keys(self._keys):
            self._capture(key)

    @property
    def num_captured(self) -> int:
        return len(self._batches)

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    @property
    def rows(self) -> dict[str, list[int]]:
        """As graph_rows."""
        return graph_rows(self._keys)

    def capture_next(self) -> bool:
        """Capture the smallest that is not yet. Returns False where there is none."""
        key = next((key for key in self._keys if key not in self._batches), None)
        return key is not None and self._has(key)

    def _has(self, key: GraphKey) -> bool:
        """Whether the graph is there, captured now where it was not.

        Where the device has no memory for it, there will be no others than those captured.
        """
        if key not in self._batches:
            try:
                self._capture(key)
            except (RuntimeError, MemoryError) as error:
                # With `in_step` the others have the graph, and would wait for this rank in it.
                if self.in_step or not ran_out_of_memory(error):
                    raise
                self._keys = [each for each in self._keys if each in self._batches]
                logger.warning(
                    "No memory for more than %d CUDA graphs; lower --gpu-memory-utilization",
                    len(self._keys),
                )
                return False
        return True

    def _capture(self, key: GraphKey) -> None:
        """Takes about 0.1 s for 32 layers, and waits for the step in flight."""
        self._buffers.pad_(key)
        batch = self._buffers.batch(key, self._max_context_len)
        self._step(batch)  # compiles kernels, which a capture may not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, self._pool):
            outputs = self._step(batch)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, outputs
        self._batches[key] = batch

    def key_for(self, step: StepInput) -> GraphKey | None:
        """The smallest graph that holds a step, captured now where it was not, or None."""
        if step.max_context_len > self._max_context_len:
            return None
        if step.block_tables_RX.shape[1] > self._table_width:  # pages of tokens still to come
            return None
        key = smallest_key(self._keys, step)
        return key if key is None or self._has(key) else smallest_key(self._keys, step)

    @property
    def decode_keys(self) -> list[GraphKey]:
        """Those captured of requests with equally many tokens, the smallest first."""
        return [key for key in self._keys if key in self._batches and not key.is_chunk]

    def padded(self, key: GraphKey) -> Batch:
        """Where a graph reads its step, filled with one of nothing."""
        self._buffers.pad_(key)
        return self._batches[key]

    def fill_(self, key: GraphKey, step: StepInput) -> Batch:
        """Copy a step to where its graph reads it. Returns these places."""
        self._buffers.fill_(key, step)
        return self._batches[key]

    def outputs(self, key: GraphKey) -> StepOutputs:
        """Where the graph leaves its results."""
        return self._graphs[key][1]

    def expect(self, key: GraphKey) -> None:
        """Assert that the buffers hold a step for a graph: another's tokens would be positions."""
        holds = self._buffers.holds
        assert holds == key, f"the buffers hold a step of {holds}, not of {key}: fill_ comes first"

    def replay(self, key: GraphKey) -> StepOutputs:
        """Run the graph on the buffers. Its results are valid until the next replay.

        A row for each request of a decode step, for each entry of logits_rows_S of another; rows
        beyond are padding.
        """
        self.expect(key)
        graph, outputs = self._graphs[key]
        graph.replay()
        return outputs
