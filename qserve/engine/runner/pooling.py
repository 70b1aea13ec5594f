"""Pooling: selects and sums a step's hidden states, and returns the resulting vectors.

The vector of a prompt is one row, or the sum of all rows for mean pooling. Each step adds the rows
that it computes, so chunking a prompt changes only the rounding. In batch-invariant mode the host
adds the rows one by one, so chunking changes no bit. A preempted request adds no row twice.

P: rows. Q: vectors of the step. C: hidden size. L: rows whose logits are read.
"""

from dataclasses import dataclass

import numpy as np
import torch

from formats.errors import InputError
from qserve.engine.pooled import Pooled
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import StepPlan
from qserve.engine.step.step_input import PoolRows
from qserve.engine.step.transfer import HostCopy, to_device
from qserve.model.decoder import Decoder
from qserve.model.model_config import ModelConfig
from qserve.pooling.params import ALL, CLS, KINDS_OF_LOGITS, LABELS, MEAN, TOKENS, PoolingParams

NO_HEAD = "needs token logits, and this model's checkpoint has no output head"


def check_pooling(subject: str, params: PoolingParams, model: ModelConfig) -> None:
    """Raise InputError for pooling parameters that the model does not support."""
    if params.kind is None:
        raise ValueError("params.kind is None; PoolingConfig.complete sets the model's kind")
    if params.dimensions is not None and params.dimensions > model.hidden_size:
        raise InputError(
            f"{subject} dimensions",
            f"expected at most {model.hidden_size}, the model's hidden size,"
            f" found {params.dimensions}",
            "leave dimensions out, or lower it",
        )
    if params.kind == LABELS and not model.labels:
        raise InputError(
            subject,
            "asks for class scores, but this model's checkpoint has no score.weight",
            "serve a ForSequenceClassification model",
        )
    if params.kind == TOKENS and model.instead_of_head:
        raise InputError(subject, NO_HEAD, "request embeddings instead")
    for token in params.token_ids:
        if not 0 <= token < model.vocab_size:
            raise InputError(
                f"{subject} token_ids",
                f"token id {token} is not in 0..{model.vocab_size - 1}",
                "encode the text with this model's tokenizer",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Rows that one step pools, and the requests that get the results."""

    rows: PoolRows
    of_vectors: tuple[tuple[Request, int], ...]  # (request, number of vectors), in order
    of_logits: tuple[Request, ...]  # requests that get logits, in order


def plan_pool_rows(plan: StepPlan, *, by_rows: bool = False) -> PoolPlan | None:
    """Return the rows of a step to pool, or None. Marks these rows as taken.

    `by_rows`: for mean pooling return all rows instead of one sum per step.
    """
    whole = (ALL, MEAN) if by_rows else (ALL,)
    rows, counts, of_vectors, logit_rows, of_logits, next_row = [], [], [], [], [], 0
    for chunk in plan.chunks:
        request, offset = chunk.request, next_row - chunk.start
        next_row += chunk.count
        pooled = request.pooled
        if pooled is None:
            continue
        low, high = _rows_of(pooled, request.num_prompt_tokens)
        low, high = max(low, chunk.start), min(high, chunk.end)
        if low >= high:
            continue
        pooled.num_rows = high
        if pooled.params.kind in KINDS_OF_LOGITS:
            logit_rows.append(offset + low)
            of_logits.append(request)
            continue
        rows.append(np.arange(offset + low, offset + high))
        is_whole = pooled.params.kind in whole
        counts += [1] * (high - low) if is_whole else [high - low]
        of_vectors.append((request, high - low if is_whole else 1))
    if not rows and not logit_rows:
        return None
    found = PoolRows(
        rows=np.concatenate(rows) if rows else np.zeros(0, np.int64),
        counts=np.array(counts, np.int64),
        logit_rows=np.array(logit_rows, np.int64),
        logit_tokens=tuple(request.pooled.params.token_ids for request in of_logits),
    )
    return PoolPlan(rows=found, of_vectors=tuple(of_vectors), of_logits=tuple(of_logits))


def _rows_of(pooled: Pooled, num_tokens: int) -> tuple[int, int]:
    """Return the range [low, high) of a prompt's rows that are still needed."""
    kind = pooled.params.kind
    low, high = 0, num_tokens
    if kind == CLS:
        high = 1
    elif kind not in (ALL, MEAN):
        low = num_tokens - 1
    return max(low, pooled.num_rows), high


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHandle:
    """Pooled values that are being copied to the host."""

    sums: HostCopy | None  # [Q, C] float32
    logits: tuple[HostCopy, ...]  # one for each of the L rows

    def give_to(self, plan: PoolPlan) -> None:
        """Wait for the values, then add them to the requests."""
        if self.sums is not None:
            sums_QC, first = self.sums.wait().numpy(), 0
            for request, count in plan.of_vectors:
                request.pooled.take(sums_QC[first : first + count])
                first += count
        for request, logits in zip(plan.of_logits, self.logits, strict=True):
            request.pooled.parts.append(logits.wait().numpy())


def launch_pooling(decoder: Decoder, hidden_TC: torch.Tensor, rows: PoolRows) -> PoolHandle:
    """Sum the rows of each vector, in float32 and in order, and read the requested logits."""
    device, sums, logits = hidden_TC.device, None, []
    if len(rows.rows):
        hidden_PC = hidden_TC[to_device(rows.rows, device)].float()
        if len(rows.rows) != len(rows.counts):
            lengths = to_device(rows.counts, device)
            hidden_PC = torch.segment_reduce(hidden_PC, "sum", lengths=lengths, unsafe=True)
        sums = HostCopy(hidden_PC)
    if len(rows.logit_rows):
        for row, tokens in zip(rows.logit_rows.tolist(), rows.logit_tokens, strict=True):
            hidden_1C = hidden_TC[row : row + 1]
            if tokens:
                index = to_device(np.array(tokens, np.int64), device)
                found = decoder.logits(hidden_1C)[0, index].float()
            else:
                found = decoder.labels(hidden_1C)[0]
            logits.append(HostCopy(found))
    return PoolHandle(sums=sums, logits=tuple(logits))
