"""The runner: a step becomes device work. Knows steps and pages, no requests and no queue.

`launch()` returns at once with a handle; `StepHandle.result()` waits for the sampled tokens. Tokens
that the host does not know yet are taken on the device from the samples of the step in flight.
"""

from dataclasses import dataclass

import numpy as np
import torch

from qkernels import ops
from qkernels.attention.cache import PagedKv
from qkernels.sampling.settings import INVALID_TOKEN, SampleSettings
from qserve.config import EngineConfig
from qserve.engine.batch import Batch
from qserve.engine.cuda_graphs import StepGraphs
from qserve.engine.page_copies import PageCopies
from qserve.engine.pooling import PoolHandle, launch_pooling
from qserve.engine.prompt_logprobs import SLICE_BYTES, PromptHandle, launch_prompt_logprobs
from qserve.engine.request import TokenLogprobs
from qserve.engine.sampler import TokenHistory
from qserve.engine.step_input import StepInput
from qserve.engine.transfer import HostCopy, to_device
from qserve.engine.warm_up import warm_up_steps
from qserve.model.decoder import Decoder
from qserve.model.kv_format import new_cache, pick_kv_format
from qserve.model.layer_kinds import sample_of_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHandle:
    """A step in flight."""

    tokens: HostCopy | None = None  # None: no row of the step samples
    num_logprobs: tuple[int, ...] = ()  # what each sampled row asked for; -1: nothing
    # log-probs of the sampled and top-k tokens, and the top-k ids; None if not requested
    log_probabilities: tuple[HostCopy, HostCopy, HostCopy] | None = None
    prompts: PromptHandle | None = None  # log probabilities of prompts, where the step tells them
    pools: PoolHandle | None = None  # what makes vectors of prompts, where any are asked for

    def result(self) -> list[int | str]:
        """Wait; then one token for each sampled row, or the reason why there is none."""
        if self.tokens is None:
            return []
        return [
            "the model's logits contain NaN" if token == INVALID_TOKEN else token
            for token in self.tokens.wait().tolist()
        ]

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """Wait; then one for each sampled row, None where it did not ask."""
        if self.log_probabilities is None:
            return None
        drawn, tops, tokens = (copy.wait().tolist() for copy in self.log_probabilities)
        rows = zip(self.num_logprobs, drawn, tops, tokens, strict=True)
        return [
            None if count < 0 else TokenLogprobs(one, tuple(ids[:count]), tuple(top[:count]))
            for count, one, top, ids in rows
        ]


class ModelRunner:
    """A decoder, its KV pages, and the step in flight."""

    def __init__(self, decoder: Decoder, config: EngineConfig, device: torch.device) -> None:
        self.decoder = decoder
        self.config = config
        self.device = device
        self.kv_format = pick_kv_format(config.kv_cache_dtype, decoder, device)
        self.caches: list[PagedKv] = []
        self._last_samples: torch.Tensor | None = None
        self._history = TokenHistory(config.max_num_seqs, decoder.config.vocab_size, device)
        self.graphs: StepGraphs | None = None
        self._page_copies: PageCopies | None = None

    @property
    def bytes_per_page(self) -> int:
        """Keys and values of one page, all layers."""
        model = self.decoder.config
        heads = 2 * self.config.block_size * model.num_kv_heads * model.num_layers
        return heads * self.kv_format.bytes_per_head(model.head_dim)

    @property
    def bytes_to_come(self) -> int:
        """What requests may still ask of the device's memory, beside steps."""
        return self._history.bytes_to_come + SLICE_BYTES

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

    def sample(self) -> "ModelRunner":
        """A runner of as few layers as launch every kernel. Shares weights and KV pages."""
        decoder, numbers = sample_of_layers(self.decoder)
        runner = ModelRunner(decoder, self.config, self.device)
        runner.caches = [self.caches[number] for number in numbers if self.caches]
        return runner

    def warm_up_steps(self, max_num_seqs: int, max_model_len: int) -> list[StepInput]:
        """Steps that together launch every kernel that steps up to the budget can reach."""
        steps = warm_up_steps(
            self.decoder,
            self.config,
            max_tokens=min(max_model_len, self.config.max_num_batched_tokens),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_bytes=self.kv_format.dtype.itemsize,
        )
        return list(steps)

    @torch.inference_mode()
    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> None:
        """Make CUDA graphs of steps. The KV pages must stand where they will stay."""
        longest = self.config.max_seq_len_to_capture
        self.graphs = StepGraphs(
            self._sampling_logits,
            max_num_seqs=max_num_seqs,
            max_num_tokens=self.config.max_num_batched_tokens,
            max_context_len=max_model_len if longest is None else min(longest, max_model_len),
            page_size=self.config.block_size,
            device=self.device,
        )

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more graph, in an idle moment. Returns False where there is none left."""
        return self.graphs is not None and self.graphs.capture_next()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> StepHandle:
        """Start a step on the device. Does not wait for it."""
        self._move_pages(step)
        key = prompts = pools = None
        needs_hidden = step.prompt_rows is not None or step.pool_rows is not None
        if self.graphs is not None and not needs_hidden:
            key = self.graphs.key_for(step)
        if key is not None:
            self._fill_pending(step, self.graphs.fill_(key, step))
            logits_SV = self.graphs.replay(key)
            if not key.is_chunk and step.num_sampled < step.num_requests:
                logits_SV = logits_SV[to_device(step.logits_rows_S, self.device)]
            logits_SV = logits_SV[: step.num_sampled]
        else:
            batch = Batch.of(step, self.device)
            self._fill_pending(step, batch.token_ids_T)
            hidden_TC = self.forward(batch)
            logits_SV = self.decoder.logits(hidden_TC[batch.logits_rows_S])
            if step.prompt_rows is not None:
                prompts = launch_prompt_logprobs(self.decoder.logits, hidden_TC, step.prompt_rows)
            if step.pool_rows is not None:
                pools = launch_pooling(self.decoder, hidden_TC, step.pool_rows)
        if not step.num_sampled:
            self._last_samples = None
            return StepHandle(prompts=prompts, pools=pools)
        for fill in step.history_fills:
            self._history.fill_(fill)
        settings = SampleSettings.of_words(step.sample_words_SP, step.sample_bias_E)
        samples = ops.sample_(logits_SV, settings.to(self.device), self._history.table)
        # A failed row's request may be in the next step already: its token must be a valid index.
        self._last_samples = samples.tokens_S.clamp(min=0)
        log_probabilities = None
        if settings.num_logprobs >= 0:
            log_probabilities = (
                HostCopy(samples.logprobs_S),
                HostCopy(samples.top_logprobs_SN),
                HostCopy(samples.top_tokens_SN),
            )
        return StepHandle(
            tokens=HostCopy(samples.tokens_S),
            num_logprobs=() if log_probabilities is None else step.num_logprobs,
            log_probabilities=log_probabilities,
            prompts=prompts,
            pools=pools,
        )

    def offload_pages(self, num_slots: int) -> None:
        """Have room for so many KV pages in the host's memory. The device's are there already."""
        self._page_copies = PageCopies(self.caches, num_slots, self.device)

    def _move_pages(self, step: StepInput) -> None:
        if step.page_moves is not None:
            self._page_copies.run(step.page_moves)

    def _sampling_logits(self, batch: Batch) -> torch.Tensor:
        """Logits [S, V] of the rows that sample."""
        return self.decoder.logits(self.forward(batch)[batch.logits_rows_S])

    def _fill_pending(self, step: StepInput, token_ids: torch.Tensor) -> None:
        """Put tokens of the step in flight, which the host does not know yet, into their places."""
        count = len(step.pending_index)
        if count == 0:
            return
        in_order = np.arange(count)
        if np.array_equal(step.pending_index, in_order) and np.array_equal(
            step.pending_row, in_order
        ):  # decode steps of the same requests, the usual case
            token_ids[:count] = self._last_samples[:count]
            return
        index, rows = (
            to_device(array, self.device) for array in (step.pending_index, step.pending_row)
        )
        token_ids[index] = self._last_samples[rows]

    @torch.inference_mode()
    def logits(self, step: StepInput) -> torch.Tensor:
        """Logits [T, V] in float32 after every token of a step, none of which is pending."""
        self._move_pages(step)
        return self.decoder.logits(self.forward(Batch.of(step, self.device))).float()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, C] of a batch."""
        return self.decoder(batch.token_ids_T, batch, self.caches)
