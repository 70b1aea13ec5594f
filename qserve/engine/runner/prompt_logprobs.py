"""Log probabilities of prompts: their rows in a step, and their values on the device.

Row p of a prompt gives the log probability of token p + 1. Each row is taken once, by the first
step that computes it, however the prompt is chunked; a request that is recomputed does not report
it twice. Legend: P rows, V vocabulary, N alternatives.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from qserve.engine.request import Request
from qserve.engine.scheduling.scheduler import StepPlan
from qserve.engine.step.step_input import PromptRows
from qserve.engine.step.transfer import HostCopy, to_device
from qserve.engine.token_event import TokenLogprobs

# Logits that exist at a time, in float32: 64 MiB, plus twice that for intermediate results. The
# 8000 rows of a long prompt would take 4 GB for a vocabulary of 128,256.
SLICE_LOGITS = 2**24
SLICE_BYTES = 3 * 4 * SLICE_LOGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """Prompt rows whose log probabilities one step reports."""

    rows: PromptRows
    counts: tuple[tuple[Request, int], ...]  # requests and their numbers of rows, in order


def plan_prompt_rows(plan: StepPlan) -> PromptPlan | None:
    """The requested rows of a step, or None. Marks them as taken."""
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
    """Values on their way to the host."""

    logprobs: HostCopy  # [P]
    ranks: HostCopy  # [P]
    top_logprobs: HostCopy  # [P, N]
    top_tokens: HostCopy  # [P, N]

    def give_to(self, plan: PromptPlan) -> None:
        """Wait, then add to each request the values of its rows."""
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
    """Compute in slices of rows. `logits_of` maps hidden states [S, C] to logits [S, V]."""
    device = hidden_TC.device
    index_P, targets_P = (to_device(array, device) for array in (rows.rows, rows.targets))
    parts: list[tuple[torch.Tensor, ...]] = []
    size = 1  # the first row shows the vocabulary size
    first = 0
    while first < len(rows.rows):
        logits_SV = logits_of(hidden_TC[index_P[first : first + size]]).float()
        target_S1 = logits_SV.gather(1, targets_P[first : first + size, None])
        total_S1 = logits_SV.logsumexp(-1, keepdim=True)
        top = logits_SV.topk(min(rows.num_alternatives, logits_SV.shape[1]), -1)
        rank_S = (logits_SV > target_S1).sum(-1) + 1
        parts.append(((target_S1 - total_S1)[:, 0], rank_S, top.values - total_S1, top.indices))
        first += size
        size = max(1, SLICE_LOGITS // logits_SV.shape[1])
    columns = [HostCopy(torch.cat(column)) for column in zip(*parts, strict=True)]
    return PromptHandle(
        logprobs=columns[0], ranks=columns[1], top_logprobs=columns[2], top_tokens=columns[3]
    )
