"""Sampler: samples the tokens of steps. TokenHistory: token counts for penalties."""

import math

import numpy as np
import torch

from qkernels import ops
from qkernels.sampling.settings import Samples, SampleSettings
from qserve.engine.runner.step_handle import LaunchedForward, StepHandle
from qserve.engine.step.step_input import HistoryFill, StepInput
from qserve.engine.step.transfer import HostCopy, to_device


class TokenHistory:
    """Table on the device: how often each token occurs in each request with penalties.

    The sampler adds the tokens that it samples on the device, so the counts include the token of
    the in-flight step. The engine assigns rows to requests (request_rows.py).
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self.table: torch.Tensor | None = None  # [W, V] int32, allocated at the first fill

    @property
    def deferred_bytes(self) -> int:
        """Bytes of the table if it is not allocated yet, else 0."""
        return 0 if self.table is not None else math.prod(self._shape) * torch.int32.itemsize

    def fill_(self, fill: HistoryFill) -> None:
        """Set a row to a sequence's counts: 1 if in the prompt, plus 2 per time in the output."""
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        counts_V = self.table[fill.row].zero_()
        prompt = to_device(fill.prompt_token_ids, self._device)
        output = to_device(fill.output_token_ids, self._device)
        counts_V.index_fill_(0, prompt, 1)
        counts_V.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))


class Sampler:
    """Samples the tokens of steps, and keeps the tokens of the last step on the device."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """`num_rows`: maximum number of requests with penalties."""
        self.history, self._device = TokenHistory(num_rows, vocab_size, device), device
        self.last_samples: torch.Tensor | None = None  # None: the last step samples nothing

    def launch(self, step: StepInput, forward: LaunchedForward) -> StepHandle:
        """Start sampling for a step whose forward pass was launched."""
        outputs, logits_SV, prompts, pools, drafting, _ = forward
        if not step.num_sampled:
            self.last_samples = None
            if drafting is not None:
                drafting.propose(outputs)
            return StepHandle(prompts=prompts, pools=pools)
        for fill in step.history_fills:
            self.history.fill_(fill)
        settings = SampleSettings.of_words(step.sample_words_SP, step.sample_bias_E)
        emitted = drafts = None
        if drafting is None:
            samples = self._draw(logits_SV, settings.to(self._device))
            # A failed row has token -1. Its request may be in the next step already, which needs a
            # valid token id.
            self.last_samples = samples.tokens_S.clamp(min=0)
            tokens = HostCopy(samples.tokens_S)
        else:
            samples = drafting.draw(logits_SV, settings, self._draw, self.history.table)
            tokens, emitted = drafting.tokens, drafting.num_emitted
            drafts = drafting.propose(outputs)
        log_probabilities = None
        if settings.num_logprobs >= 0:
            log_probabilities = (
                HostCopy(samples.logprobs_S),
                HostCopy(samples.top_logprobs_SN),
                HostCopy(samples.top_tokens_SN),
            )
        return StepHandle(
            tokens=tokens,
            num_logprobs=() if log_probabilities is None else step.num_logprobs,
            log_probabilities=log_probabilities,
            prompts=prompts,
            pools=pools,
            emitted=emitted,
            drafts=drafts,
        )

    def fill_pending_(self, step: StepInput, token_ids_T: torch.Tensor) -> None:
        """Fill in tokens of the in-flight step, which the host does not know yet."""
        count = len(step.pending_index)
        if count == 0:
            return
        in_order = np.arange(count)
        if np.array_equal(step.pending_index, in_order) and np.array_equal(
            step.pending_row, in_order
        ):  # usual case: consecutive decode steps of the same requests
            token_ids_T[:count] = self.last_samples[:count]
            return
        index, rows = (
            to_device(array, self._device) for array in (step.pending_index, step.pending_row)
        )
        token_ids_T[index] = self.last_samples[rows]

    def _draw(self, logits_SV: torch.Tensor, settings: SampleSettings) -> Samples:
        return ops.sample_(logits_SV, settings, self.history.table)
