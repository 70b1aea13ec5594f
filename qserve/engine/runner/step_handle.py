"""In-flight steps: what a launch returns, and what is kept between a forward pass and sampling."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qkernels.sampling.settings import INVALID_TOKEN
from qserve.engine.runner.graphs.step_buffers import StepOutputs
from qserve.engine.runner.pooling import PoolHandle
from qserve.engine.runner.prompt_logprobs import PromptHandle
from qserve.engine.runner.speculator import DraftedStep
from qserve.engine.step.transfer import HostCopy
from qserve.engine.token_event import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHandle:
    """In-flight step."""

    tokens: HostCopy | None = None  # None: no row of the step samples
    num_logprobs: tuple[int, ...] = ()  # what each sampled row asked for; -1: nothing
    # log-probs of the sampled and top-k tokens, and the top-k ids; None if not requested
    log_probabilities: tuple[HostCopy, HostCopy, HostCopy] | None = None
    prompts: PromptHandle | None = None  # log probabilities of prompts, where requested
    pools: PoolHandle | None = None  # what makes vectors of prompts, where any are asked for
    emitted: HostCopy | None = None  # of each chunk that samples, how many tokens; None: all
    drafts: HostCopy | None = None  # what was proposed for each of them, where the host asks

    def result(self) -> list[int | str]:
        """Wait; then one token for each sampled row, or the reason why there is none."""
        if self.tokens is None:
            return []
        return [
            "the model's logits contain NaN" if token == INVALID_TOKEN else token
            for token in self.tokens.wait().tolist()
        ]

    def num_emitted(self) -> list[int] | None:
        """Wait; then of each chunk that samples how many of its tokens are output; None: all."""
        return None if self.emitted is None else self.emitted.wait().tolist()

    def proposed(self) -> list[list[int]] | None:
        """Wait; then what a drafter proposed for each chunk that samples, where asked for."""
        return None if self.drafts is None else self.drafts.wait().tolist()

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


class LaunchedForward(NamedTuple):
    """Forward pass of a step that has not sampled yet."""

    outputs: StepOutputs
    logits_SV: torch.Tensor  # of the rows that sample
    prompts: PromptHandle | None
    pools: PoolHandle | None
    drafting: DraftedStep | None
    done: torch.cuda.Event | None  # where the host may ask; None on a CPU
