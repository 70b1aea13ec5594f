"""The runner: a planned step becomes device work. Knows batches and pages, not the queue.

`launch()` returns at once with a handle; `StepHandle.result()` waits for the sampled tokens. Tokens
that the host does not know yet are taken on the device from the samples of the step in flight.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from formats.errors import InputError
from qkernels import ops
from qkernels.sampling.settings import INVALID_TOKEN, SampleSettings
from qserve.config import EngineConfig
from qserve.engine.batch import Batch, HostBatch, build
from qserve.engine.cuda_graphs import StepGraphs
from qserve.engine.request import Request, TokenLogprobs
from qserve.engine.sampler import TokenHistory, sample_row
from qserve.engine.scheduler import StepPlan, whole_chunk
from qserve.engine.transfer import HostCopy, to_device
from qserve.model.blocks.attention import LayerCache
from qserve.model.decoder import Decoder
from qserve.model.kv_format import new_cache, pick_kv_format
from qserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

GIB = 2**30
# A kernel's tile changes at most at these numbers of rows (qkernels/tiles.py).
WARM_UP_COUNTS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 256, 257, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHandle:
    """A step in flight."""

    plan: StepPlan
    tokens: HostCopy | None  # None: no row of the step samples
    # of the drawn tokens, of the likeliest, and these; None: nobody asked
    log_probabilities: tuple[HostCopy, HostCopy, HostCopy] | None = None

    def result(self) -> list[int | str]:
        """Wait; then one token for each sampling chunk, or the reason why there is none."""
        if self.tokens is None:
            return []
        return [
            "the model's logits contain NaN" if token == INVALID_TOKEN else token
            for token in self.tokens.wait().tolist()
        ]

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """Wait; then one for each sampling chunk, None where its request did not ask."""
        if self.log_probabilities is None:
            return None
        drawn, tops, tokens = (copy.wait().tolist() for copy in self.log_probabilities)
        asked = [chunk.request.params.logprobs for chunk in self.plan.chunks if chunk.samples]
        return [
            None if count is None else TokenLogprobs(one, tuple(ids[:count]), tuple(top[:count]))
            for count, one, top, ids in zip(asked, drawn, tops, tokens, strict=True)
        ]


class ModelRunner:
    """A decoder, its KV pages, and the step in flight."""

    def __init__(self, decoder: Decoder, config: EngineConfig, device: torch.device) -> None:
        self.decoder = decoder
        self.config = config
        self.device = device
        self.kv_format = pick_kv_format(config.kv_cache_dtype, decoder, device)
        self.caches: list[LayerCache] = []
        self._last_samples: torch.Tensor | None = None
        self._last_rows: dict[Request, int] = {}
        self._history = TokenHistory(config.max_num_seqs, decoder.config.vocab_size, device)
        self._graphs: StepGraphs | None = None

    @property
    def bytes_per_page(self) -> int:
        """Keys and values of one page, all layers."""
        model = self.decoder.config
        heads = 2 * self.config.block_size * model.num_kv_heads * model.num_layers
        return heads * self.kv_format.bytes_per_head(model.head_dim)

    @property
    def bytes_to_come(self) -> int:
        """What requests may still ask of the device's memory, beside steps."""
        return self._history.bytes_to_come

    def allocate_pages(self, num_pages: int) -> None:
        """Make the KV pages. Zeros: padding rows may read a page before it is written."""
        model, page_size = self.decoder.config, self.config.block_size
        self.caches = [
            new_cache(
                layer.attention,
                self.kv_format,
                (num_pages, page_size, model.num_kv_heads, model.head_dim),
                self.device,
            )
            for layer in self.decoder.layers
        ]

    @torch.inference_mode()
    def warm_up(self, longest: int) -> None:
        """Compile the kernels of every size class of step, so that none compiles while serving."""
        for count in WARM_UP_COUNTS:
            if count <= longest:
                pages = list(range(-(-count // self.config.block_size)))
                chunk = whole_chunk([0] * count, pages, SamplingParams())
                self.launch(StepPlan(chunks=(chunk,))).result()

    @torch.inference_mode()
    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> None:
        """Capture steps as CUDA graphs. The KV pages must stand where they will stay."""
        self._graphs = StepGraphs(
            self._sampling_logits,
            max_num_seqs=max_num_seqs,
            max_num_tokens=self.config.max_num_batched_tokens,
            max_model_len=max_model_len,
            page_size=self.config.block_size,
            device=self.device,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step on the device. Does not wait for it."""
        host = build(plan, self.config.block_size, self._last_rows)
        kind = None
        if self._graphs is not None:
            kind = self._graphs.kind_for(host.arrays, host.max_query_len)
        if kind is not None:
            self._fill_pending(host, self._graphs.fill_(kind, host.arrays))
            logits_SV = self._graphs.replay(kind)
            rows = host.arrays["logits_rows_S"]
            if not kind.is_chunk and len(rows) < len(plan.chunks):
                logits_SV = logits_SV[to_device(rows, self.device)]
            logits_SV = logits_SV[: len(rows)]
        else:
            batch = host.to(self.device)
            self._fill_pending(host, batch.token_ids_T)
            logits_SV = self._sampling_logits(batch)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        if not sampling:
            self._last_samples, self._last_rows = None, {}
            return StepHandle(plan=plan, tokens=None)
        settings = SampleSettings.of([sample_row(chunk, self._history) for chunk in sampling])
        samples = ops.sample_(logits_SV, settings.to(self.device), self._history.table)
        # A failed row's request may be in the next step already: its token must be a valid index.
        self._last_samples = samples.tokens_S.clamp(min=0)
        self._last_rows = {chunk.request: row for row, chunk in enumerate(sampling)}
        log_probabilities = None
        if settings.num_logprobs >= 0:
            log_probabilities = (
                HostCopy(samples.logprobs_S),
                HostCopy(samples.top_logprobs_SN),
                HostCopy(samples.top_tokens_SN),
            )
        return StepHandle(
            plan=plan, tokens=HostCopy(samples.tokens_S), log_probabilities=log_probabilities
        )

    def _sampling_logits(self, batch: Batch) -> torch.Tensor:
        """Logits [S, V] of the rows that sample."""
        return self.decoder.logits(self.forward(batch)[batch.logits_rows_S])

    def _fill_pending(self, host: HostBatch, token_ids: torch.Tensor) -> None:
        """Put tokens of the step in flight, which the host does not know yet, into their places."""
        count = len(host.pending_index)
        if count == 0:
            return
        in_order = np.arange(count)
        if np.array_equal(host.pending_index, in_order) and np.array_equal(
            host.pending_row, in_order
        ):  # decode steps of the same requests, the usual case
            token_ids[:count] = self._last_samples[:count]
            return
        index, rows = (
            to_device(array, self.device) for array in (host.pending_index, host.pending_row)
        )
        token_ids[index] = self._last_samples[rows]

    @torch.inference_mode()
    def logits(self, token_ids: list[int], pages: list[int]) -> torch.Tensor:
        """Logits [S, V] in float32 after each of S tokens, computed in one step on `pages`."""
        plan = StepPlan(chunks=(whole_chunk(token_ids, pages, SamplingParams()),))
        batch = build(plan, self.config.block_size, {}).to(self.device)
        return self.decoder.logits(self.forward(batch)).float()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, C] of a batch."""
        return self.decoder(batch.token_ids_T, batch, self.caches)


def num_pages_on_cpu(runner: ModelRunner) -> int:
    """KV pages that `cpu_kv_cache_memory` holds. Raises InputError where it holds none."""
    memory = runner.config.cpu_kv_cache_memory
    num_pages = int(memory * GIB) // runner.bytes_per_page
    if num_pages < 1:
        raise InputError(
            "--cpu-kv-cache-memory",
            f"{memory} GiB hold no KV page of {runner.bytes_per_page / GIB:.3g} GiB",
            "raise it, or lower --block-size",
        )
    return num_pages


def num_pages_on_gpu(runner: ModelRunner, largest_step: StepPlan) -> int:
    """KV pages that fit beside the weights and the activations of the largest step.

    Runs that step once on a few pages to see its peak. Raises InputError where nothing is left.
    """
    device = runner.device
    runner.allocate_pages(max(len(c.request.block_table) for c in largest_step.chunks))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(largest_step).result()
    runner.caches = []
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    # Beside torch's own: the CUDA context, other processes.
    outside = total - free - stats["reserved_bytes.all.current"]
    # And the table of the first request with a penalty, which is made while requests run.
    peak = stats["allocated_bytes.all.peak"] + outside + runner.bytes_to_come
    budget = total * runner.config.gpu_memory_utilization
    num_pages = int(budget - peak) // runner.bytes_per_page
    if num_pages < 1:
        raise InputError(
            "--gpu-memory-utilization",
            f"weights and activations take {peak / GIB:.1f} GiB of the {budget / GIB:.1f} GiB"
            " it allows, which leaves nothing for KV pages",
            "raise it, lower --max-num-batched-tokens, or use a smaller model",
        )
    return num_pages
