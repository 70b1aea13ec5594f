"""Log probabilities of prompts: selects rows of a step and computes their values on the device.

Row p of a prompt gives the log probability of token p + 1. Each row is taken once, by the first
step that computes it, so a preempted request does not report a row twice. The sampling operation
computes the values: from equal logits, a prompt token and a generated token get the same bits.

P: rows. S: rows of a slice. V: vocabulary size. N: alternatives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from qkernels import ops
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import (
    BIAS_END,
    BIAS_START,
    NUM_WORDS,
    SampleRow,
    pack_bias,
    pack_row,
)
from qserve.engine.request import Request
from qserve.engine.scheduling.scheduler import StepPlan
from qserve.engine.step.step_input import PromptRows
from qserve.engine.step.transfer import HostCopy, to_device
from qserve.engine.token_event import TokenLogprobs

# Maximum number of logits in memory at a time. Each takes 4 bytes, 8 more as a candidate for the
# likeliest tokens, and 1 for the rank. Without slices, the 8000 rows of a long prompt would take
# 4 GB for a vocabulary of 128,256.
SLICE_LOGITS = 2**24
SLICE_BYTES = 13 * SLICE_LOGITS
MAX_ROWS = 2**15  # rows of a slice; a kernel's grid has up to 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """Prompt rows whose log probabilities one step reports."""

    rows: PromptRows
    counts: tuple[tuple[Request, int], ...]  # (request, number of rows), in order


def plan_prompt_rows(plan: StepPlan) -> PromptPlan | None:
    """Return the requested rows of a step, or None. Marks these rows as taken."""
    rows, targets, counts, first = [], [], [], 0
    for chunk in plan.chunks:
        request, start = chunk.request, first
        first += chunk.count
        if request.prompt_logprobs is None:
            continue
        low = max(chunk.start, request.num_prompt_rows)
        high = min(chunk.end, request.num_prompt_tokens - 1)
        if low >= high:
            continue
        assert low == request.num_prompt_rows, "rows of the prompt were skipped"
        request.num_prompt_rows = high
        rows.append(np.arange(start + low - chunk.start, start + high - chunk.start))
        targets.append(np.array(request.token_ids[low + 1 : high + 1], np.int64))
        counts.append((request, high - low))
    if not counts:
        return None
    found = PromptRows(
        rows=np.concatenate(rows),
        targets=np.concatenate(targets),
        num_alternatives=max(request.params.prompt_logprobs for request, _ in counts),
    )
    return PromptPlan(rows=found, counts=tuple(counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHandle:
    """Log probabilities that are being copied to the host."""

    logprobs: HostCopy  # [P]
    ranks: HostCopy  # [P]
    top_logprobs: HostCopy  # [P, N]
    top_tokens: HostCopy  # [P, N]

    def give_to(self, plan: PromptPlan) -> None:
        """Wait for the values, then add them to the requests."""
        columns = (self.logprobs, self.top_tokens, self.top_logprobs, self.ranks)
        entries = zip(*(copy.wait().tolist() for copy in columns), strict=True)
        for request, count in plan.counts:
            most = request.params.prompt_logprobs
            for _ in range(count):
                logprob, tokens, values, rank = next(entries)
                request.prompt_logprobs.append(
                    TokenLogprobs(logprob, tuple(tokens[:most]), tuple(values[:most]), rank)
                )


def launch_prompt_logprobs(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden_TC: torch.Tensor, rows: PromptRows
) -> PromptHandle:
    """Start computing log probabilities, in slices of rows.

    `logits_of`: maps hidden states [S, C] to logits [S, V].
    """
    device = hidden_TC.device
    index_P, targets_P = (to_device(array, device) for array in (rows.rows, rows.targets))
    parts: list[tuple[torch.Tensor, ...]] = []
    size = 1  # the first slice has one row and shows the vocabulary size
    first = 0
    while first < len(rows.rows):
        piece = slice(first, first + size)
        logits_SV = logits_of(hidden_TC[index_P[piece]])
        count = min(rows.num_alternatives, logits_SV.shape[1])
        settings = drawing(rows.targets[piece], count).to(device)
        samples = ops.sample_(logits_SV, settings)
        target_S1 = logits_SV.gather(1, targets_P[piece, None])
        # a token with probability 0 cannot be drawn, even with a bias
        logprob_S = torch.where(target_S1[:, 0] == -torch.inf, -torch.inf, samples.logprobs_S)
        rank_S = (logits_SV > target_S1).sum(-1) + 1
        parts.append((logprob_S, rank_S, samples.top_logprobs_SN, samples.top_tokens_SN))
        first += size
        size = min(MAX_ROWS, max(1, SLICE_LOGITS // logits_SV.shape[1]))
    columns = [HostCopy(torch.cat(column)) for column in zip(*parts, strict=True)]
    return PromptHandle(
        logprobs=columns[0], ranks=columns[1], top_logprobs=columns[2], top_tokens=columns[3]
    )


def drawing(tokens_S: np.ndarray, num_logprobs: int) -> SampleSettings:
    """Return settings with which sampling draws the given tokens: each has an infinite bias."""
    words_SP = np.empty((len(tokens_S), NUM_WORDS), np.int64)
    words_SP[:, :BIAS_START] = pack_row(SampleRow(num_logprobs=num_logprobs))
    words_SP[:, BIAS_START] = np.arange(len(tokens_S))
    words_SP[:, BIAS_END] = words_SP[:, BIAS_START] + 1
    (entry,) = pack_bias(SampleRow(bias=((0, math.inf),)))
    return SampleSettings.of_words(words_SP, tokens_S.astype(np.int64) << 32 | entry)
