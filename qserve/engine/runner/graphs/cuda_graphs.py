"""Steps as CUDA graphs: one launch instead of hundreds.

A step runs in the graph of the next larger size. There are two kinds: decode graphs for R requests
with the same number of tokens, and chunk graphs for T tokens of any requests. Chunk graphs are for
short prompts, whose kernels take Python longer to launch than the GPU to run. The unused rest of a
graph is padding: tokens with slot -1, requests with no rows and no keys. Graphs read their inputs
from fixed addresses (step_buffers.py) and share one memory pool.

At startup only a few graphs are captured: the largest ones, which determine the size of the memory
pool, and the smallest ones, which the first request uses. The others are captured while the engine
is idle, or when a step first needs them.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from qserve.engine.runner.graphs.capture import capture
from qserve.engine.runner.graphs.media_buffers import MediaBuffers
from qserve.engine.runner.graphs.step_buffers import GraphKey, StepBuffers, StepOutputs
from qserve.engine.runner.graphs.whole_steps import MAX_ROWS, WholeSteps, is_whole
from qserve.engine.runner.out_of_memory import ran_out
from qserve.engine.step.decode_rows import num_decodes
from qserve.engine.step.device_step import Batch
from qserve.engine.step.step_input import StepInput, table_width
from qserve.engine.step.transfer import HostCopy

logger = logging.getLogger(__name__)

# The first token of an 8B in W4A16 on an H200 takes 17.6 / 20.4 ms with graphs, for 768 / 1000
# tokens. Python needs 22 to 23 ms to launch a step of any size (32 layers; measured with 8). For
# longer prompts the kernels take longer than the launch (45 ms for 2048 tokens), so a graph would
# only add padding. Prompt lengths are often powers of two, and decodes run in the same step: up to
# 64 of them fit into the next size.
CHUNK_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 576, 768, 1024, 1088)
# Layers with experts or states launch two to four times as many kernels, each with fewer weights.
# Python needs 56 to 87 ms to launch a step of DeepSeek-V2-Lite and 141 to 196 ms for
# Qwen3.6-35B-A3B; the GPU needs 18 us per token (H100, 2026-11-28). Qwen3.6 on an H200: a prompt of
# 2,500 tokens takes 53 ms with a graph of 2,624 tokens and 62 ms without; a prompt of 3,000 tokens
# takes 63 ms both with a graph of 3,200 tokens and without.
LONG_CHUNK_SIZES = (*CHUNK_SIZES, 1344, 1600, 2048, 2112, 2624)
FEW_REQUESTS = 8  # requests in the smaller chunk graphs
# Steps with at least so many decodes run in graphs whose attention computes decodes and chunks
# separately. In a graph the context of a decode is not split, so a few long ones would be slow.
MIN_DECODES = 32
# Such graphs are also captured for steps of more tokens, because Python takes about 0.75 ms to
# launch a layer. A step of 1,016 decodes and 8 prompts of 128 tokens takes about as long on an H200
# (8B in W8A8) as launching it: with these graphs 30,227 and 30,919 tokens/s, 31,351 and 30,428
# without. On slower hosts, or with fewer tokens, they save the difference.
APART = 256  # tokens between these sizes


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether a capture ran out of memory, even if ending it raised another error."""
    while isinstance(error, RuntimeError | MemoryError):
        if ran_out(error):
            return True
        error = error.__context__
    return False


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the request counts to capture: 1, 2, 4, multiples of 8 up to 64, then of 32."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def decode_chunk_sizes(
    chunk_sizes: Collection[int], max_num_seqs: int, max_num_tokens: int
) -> list[int]:
    """Return the token counts of chunk graphs that compute decodes separately."""
    if max_num_seqs <= MIN_DECODES:
        return []
    last = max(chunk_sizes)
    sizes = *chunk_sizes, *range(last + APART, max_num_seqs + last + 1, APART)
    return [size for size in sizes if MIN_DECODES < size <= max_num_tokens]


def max_graph_tokens(
    chunk_sizes: Collection[int], max_num_seqs: int, max_num_tokens: int, decode_query_len: int
) -> int:
    """Return the number of tokens of the largest graph. The arguments are those of graph_keys."""
    sizes = (
        decode_chunk_sizes(chunk_sizes, max_num_seqs, max_num_tokens) if decode_query_len else []
    )
    return max([min(max(chunk_sizes), max_num_tokens), *sizes])


def graph_keys(
    max_num_seqs: int,
    max_num_tokens: int,
    counts: Collection[int] = (1,),
    max_rows: int = 0,
    with_adapters: bool = False,
    chunk_sizes: Collection[int] = CHUNK_SIZES,
    with_media: bool = False,
    with_whole: bool = False,
    decode_query_len: int = 0,
) -> list[GraphKey]:
    """Return the keys of the graphs to capture, smallest first.

    `counts`: numbers of tokens per request in decode graphs: 1, and more to verify drafts. These
    graphs have at most `max_rows` rows. Each chunk size has two graphs, for few and for many
    requests, because a padding request costs attention blocks and rows of the LM head.
    `with_adapters`: add a copy of each key for steps with adapters. `with_media`: add a copy of
    each chunk key for steps with media. `with_whole`: add a copy of each small decode key for
    whole steps. `decode_query_len`: also add chunk keys whose attention computes decodes (requests
    with at most so many rows) separately; 0: none.
    """
    most = max(max_num_seqs, max_rows)  # maximum number of sampled rows in a chunk step
    decodes = [
        GraphKey(is_chunk=False, num_tokens=size * count, num_requests=size)
        for count in counts
        for size in graph_sizes(max_num_seqs)
        if count == 1 or size * count <= min(max_rows, max_num_tokens)
    ]
    chunks = {
        GraphKey(is_chunk=True, num_tokens=size, num_requests=min(requests, size, most))
        for size in chunk_sizes
        if size <= max_num_tokens
        for requests in (FEW_REQUESTS, most)
    }
    sizes = (
        decode_chunk_sizes(chunk_sizes, max_num_seqs, max_num_tokens) if decode_query_len else ()
    )
    divided = [
        GraphKey(
            is_chunk=True,
            num_tokens=size,
            num_requests=min(size, most),
            decode_query_len=decode_query_len,
        )
        for size in sizes
    ]
    keys = [*decodes, *chunks, *divided]
    if with_whole:
        small = [key for key in decodes if key.count == 1 and key.num_requests <= MAX_ROWS]
        whole = [replace(key, is_whole=True) for key in small]
    if with_adapters:
        keys += [replace(key, has_adapters=True) for key in keys]
    if with_media:
        keys += [replace(key, has_media=True) for key in chunks]
    if with_whole:
        keys += whole
    return sorted(keys, key=_order)


def _order(key: GraphKey) -> tuple[int, ...]:
    sizes = key.num_tokens, key.num_requests
    return *sizes, key.has_adapters, key.has_media, key.is_whole, key.decode_query_len


def graph_rows(keys: Collection[GraphKey]) -> dict[str, list[int]]:
    """Return the token counts of decode graphs with one token per request, and of chunk graphs."""
    chunks = {key.num_tokens for key in keys if key.is_chunk and not key.decode_query_len}
    decodes = {k.num_tokens for k in keys if not k.is_chunk and k.num_tokens == k.num_requests}
    return {"decode": sorted(decodes), "chunk": sorted(chunks)}


def smallest_key(
    keys: list[GraphKey], step: StepInput, *, is_whole: bool = False
) -> GraphKey | None:
    """Return the smallest of `keys` whose graph holds a step, or None.

    `is_whole`: look for a graph of whole steps.
    """
    count, has_adapters = step.rows_each, step.adapter_slots_T is not None
    is_decode = count > 0 and not step.has_media
    is_chunk = not is_decode or all(key.is_chunk or key.count != count for key in keys)
    decode_query_len = max((key.decode_query_len for key in keys), default=0) if is_chunk else 0
    if step.has_media or decode_query_len and num_decodes(step, decode_query_len) < MIN_DECODES:
        decode_query_len = 0
    # a chunk graph has as many rows of logits as requests
    num_rows = max(step.num_requests, step.num_sampled) if is_chunk else step.num_requests
    for key in keys:
        fits = key.num_tokens >= step.num_tokens and key.num_requests >= num_rows
        if key.has_adapters != has_adapters or key.has_media != step.has_media:
            continue
        if key.is_whole != is_whole or key.decode_query_len != decode_query_len:
            continue
        if fits and key.is_chunk == is_chunk and (is_chunk or key.count == count):
            return key
    return None


def first_keys(keys: list[GraphKey]) -> list[GraphKey]:
    """Return the keys to capture at startup: the largest and the smallest of each sort.

    The largest comes first, so that the later graphs fit into its memory.
    """
    sorts: dict[tuple[int, ...], list[GraphKey]] = {}
    for key in keys:
        kind = 0 if key.is_chunk else key.count, key.decode_query_len
        sort = *kind, key.has_adapters, key.has_media, key.is_whole
        sorts.setdefault(sort, []).append(key)
    ends = [key for of_sort in sorts.values() for key in (of_sort[0], of_sort[-1])]
    return sorted(set(ends), key=keys.index, reverse=True)


class StepGraphs:
    """The CUDA graphs of a runner, by key."""

    def __init__(
        self,
        step: Callable[[Batch], StepOutputs | None],
        *,
        warm_up: Callable[[Batch], object],
        max_num_seqs: int,
        max_num_tokens: int,
        max_context_len: int,
        page_size: int,
        device: torch.device,
        in_step: bool = False,
        with_whole: bool = False,
        counts: Collection[int] = (1,),
        max_rows: int = 0,
        with_adapters: bool = False,
        with_states: bool = False,
        with_rope_shifts: bool = False,
        chunk_sizes: Collection[int] = CHUNK_SIZES,
        media: MediaBuffers | None = None,
        decode_query_len: int = 0,
    ) -> None:
        """Create the graphs of `step` and capture the first ones.

        On a rank without logits, `step` returns None.

        `warm_up` launches every kernel of `step`, but for fewer layers.
        `counts`, `max_rows`, `chunk_sizes` and `decode_query_len` are those of graph_keys. Steps
        with a context longer than `max_context_len` use no graph. `in_step`: other ranks capture
        and replay the same graphs in the same order. `media`: input buffers for media; None: steps
        with media use no graph. `with_whole`: also capture graphs of whole steps for small decodes.
        """
        self.in_step = in_step
        self._step, self._warm_up = step, warm_up
        self._device = device
        self._keys = graph_keys(
            max_num_seqs,
            max_num_tokens,
            counts,
            max_rows,
            with_adapters,
            chunk_sizes,
            with_media=media is not None,
            with_whole=with_whole,
            decode_query_len=decode_query_len,
        )
        self.media = media
        width = -(-max_context_len // page_size)
        self._max_context_len = width * page_size
        most = max(key.num_requests for key in self._keys)
        self._table_width = table_width(width)
        self._buffers = StepBuffers(
            self._keys,
            most,
            self._table_width,
            device,
            with_states=with_states,
            with_rope_shifts=with_rope_shifts,
        )
        self.whole: WholeSteps | None = None
        if with_whole:
            words = [self._buffers.num_words(key) for key in self._keys if key.is_whole]
            self.whole = WholeSteps(max(words), device)
        self._batches: dict[GraphKey, Batch] = {}
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, StepOutputs | None]] = {}
        self._pool: tuple[int, int] | None = None
        for key in first_keys(self._keys):
            self._capture(key)

    def close(self) -> None:
        """Free the graphs. NCCL cannot close a communicator while a graph holds its all-reduce."""
        self._keys = []
        self._batches.clear()
        self._graphs.clear()

    @property
    def num_captured(self) -> int:
        return len(self._batches)

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    @property
    def rows(self) -> dict[str, list[int]]:
        """Result of graph_rows."""
        return graph_rows(self._keys)

    def capture_next(self) -> bool:
        """Capture the smallest graph that is not captured yet. Returns False if none is left."""
        key = next((key for key in self._keys if key not in self._batches), None)
        return key is not None and self._ensure_captured(key)

    def _ensure_captured(self, key: GraphKey) -> bool:
        """Capture a graph if it does not exist yet. Returns True if it exists now.

        If the device has no memory for the graph, no further graphs are captured.
        """
        if key not in self._batches:
            try:
                self._capture(key)
            except (RuntimeError, MemoryError) as error:
                # With `in_step` the other ranks have the graph and would wait for this rank in it.
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
        """Capture a graph, which takes about 0.03 s for 32 layers. Waits for the in-flight step."""
        batch = self.batch_of(key)
        # Compile and load the kernels first, which is not allowed during a capture.
        if key.is_whole:
            with self.whole.kept_samples():
                self._buffers.pad_entry_(key, self.whole.entry())
                self._run_whole(key, batch, self._warm_up)
                self.whole.launched(0)
        else:
            self._buffers.pad_(key)
            self._warm_up(batch)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, self._pool):
            run = self._run_whole if key.is_whole else self._run
            outputs = run(key, batch, self._step)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, outputs
        self._batches[key] = batch

    def _run(
        self, key: GraphKey, batch: Batch, step: Callable[[Batch], StepOutputs | None]
    ) -> StepOutputs | None:
        return step(batch)

    def _run_whole(
        self, key: GraphKey, batch: Batch, step: Callable[[Batch], StepOutputs]
    ) -> StepOutputs:
        """Run a step, including the copy of its inputs from a host ring, and sampling."""
        self.whole.receive_(self._buffers.words(key), key.num_tokens)
        outputs = step(batch)
        self.whole.sample_(outputs.logits_SV, self._buffers.sample_words(key))
        return outputs

    def batch_of(self, key: GraphKey) -> Batch:
        """Return views of a graph's inputs."""
        batch = self._buffers.batch(key, self._max_context_len)
        return batch if self.media is None or not key.has_media else self.media.attach(batch)

    def key_for(self, step: StepInput, *, whole: bool = False) -> GraphKey | None:
        """Return the key of the smallest graph that holds a step, or None. Captures it if needed.

        `whole`: only consider graphs that include the copy of the inputs and sampling.
        """
        if whole and (self.whole is None or not is_whole(step)):
            return None
        if step.max_context_len > self._max_context_len:
            return None
        # block tables may include pages for later tokens
        if step.block_tables_RX.shape[1] > self._table_width:
            return None
        key = smallest_key(self._keys, step, is_whole=whole)
        if key is None or self._ensure_captured(key):
            return key
        return smallest_key(self._keys, step, is_whole=whole)

    @property
    def decode_keys(self) -> list[GraphKey]:
        """Keys of the captured decode graphs, smallest first."""
        keys = (key for key in self._keys if not (key.is_chunk or key.is_whole))
        return [key for key in keys if key in self._batches]

    def padded(self, key: GraphKey) -> Batch:
        """Fill the input buffers of a graph with padding only, and return them."""
        self._buffers.pad_(key)
        return self._batches[key]

    def fill_(self, key: GraphKey, step: StepInput) -> Batch:
        """Copy a step to the input buffers of its graph and return them."""
        self._buffers.fill_(key, step)
        return self._batches[key]

    def outputs(self, key: GraphKey) -> StepOutputs:
        """Return the output buffers of a graph."""
        return self._graphs[key][1]

    def expect(self, key: GraphKey) -> None:
        """Assert that the buffers hold a step in this graph's layout. Layouts of graphs differ."""
        holds = self._buffers.holds
        assert holds == key, f"the buffers hold a step of {holds}, not of {key}: call fill_ first"

    def replay_whole(
        self, key: GraphKey, step: StepInput, last_samples: torch.Tensor | None
    ) -> HostCopy:
        """Run a whole step. Returns the pending copy of its tokens to the host.

        `last_samples`: tokens of the previous step, which replace pending token ids of this step.
        """
        token_ids_T = self.whole.token_ids(step, last_samples)
        self._buffers.fill_entry_(key, step, token_ids_T, self.whole.entry())
        self._graphs[key][0].replay()
        return self.whole.launched(step.num_sampled)

    def replay(self, key: GraphKey) -> StepOutputs | None:
        """Run the graph on the buffers. The results are valid until the next replay.

        For a decode step they have one row per request, for a chunk step one row per entry of
        logits_rows_S. Rows beyond these are padding. Returns None on a rank without logits.
        """
        self.expect(key)
        graph, outputs = self._graphs[key]
        graph.replay()
        return outputs
