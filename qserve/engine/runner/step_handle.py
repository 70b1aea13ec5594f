"""StepHandle: results of an in-flight step. LaunchedForward: a step that has not sampled yet."""

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
    """The results of an in-flight step, on their way to the host."""

    tokens: HostCopy | None = None  # None: no row of the step samples
    num_logprobs: tuple[int, ...] = ()  # log probabilities requested per sampled row; -1: none
    # log probabilities of the sampled and the top-k tokens, and the top-k ids; None: not requested
    log_probabilities: tuple[HostCopy, HostCopy, HostCopy] | None = None
    prompts: PromptHandle | None = None  # log probabilities of prompts, if requested
    pools: PoolHandle | None = None  # pooled values of prompts, if requested
    emitted: HostCopy | None = None  # number of emitted tokens per chunk that samples; None: all
    drafts: HostCopy | None = None  # proposed drafts per chunk that samples, if the host needs them

    def result(self) -> list[int | str]:
        """Wait, then return one token per sampled row, or the reason why there is no token."""
        if self.tokens is None:
            return []
        return [
            "the model's logits contain NaN" if token == INVALID_TOKEN else token
            for token in self.tokens.wait().tolist()
        ]

    def num_emitted(self) -> list[int] | None:
        """Wait, then return the number of output tokens per chunk that samples; None: all."""
        return None if self.emitted is None else self.emitted.wait().tolist()

    def proposed(self) -> list[list[int]] | None:
        """Wait, then return the proposed drafts per chunk that samples; None: not requested."""
        return None if self.drafts is None else self.drafts.wait().tolist()

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """Wait, then return one entry per sampled row; None if the row requested none."""
        if self.log_probabilities is None:
            return None
        drawn, tops, tokens = (copy.wait().tolist() for copy in self.log_probabilities)
        rows = zip(self.num_logprobs, drawn, tops, tokens, strict=True)
        return [
            None if count < 0 else TokenLogprobs(one, tuple(ids[:count]), tuple(top[:count]))
            for count, one, top, ids in rows
        ]


class LaunchedForward(NamedTuple):
    """The launched forward pass of a step that has not sampled yet."""

    outputs: StepOutputs
    logits_SV: torch.Tensor  # logits of the rows that sample
    prompts: PromptHandle | None
    pools: PoolHandle | None
    drafting: DraftedStep | None
    done: torch.cuda.Event | None  # end of a forward pass that awaits masks; None on a CPU
