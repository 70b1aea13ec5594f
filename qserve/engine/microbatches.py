"""A step in parts, so that stages of a model compute different ones at the same time.

Parts follow the order of the step's tokens: what a later part attends to is written before it.
Legend: T tokens of the step, R requests (chunks).
"""

from dataclasses import replace

import numpy as np

from qserve.engine.step_input import StepInput
from qserve.parallel.pipeline import Pipeline

# Fewer tokens read the weights for as long as they compute: two parts would read them twice.
MIN_TOKENS = 256
PARTS_PER_STAGE = 2


def microbatches(step: StepInput, pipeline: Pipeline) -> list[StepInput]:
    """The parts of a step that is long enough, else the step alone."""
    count = min(step.num_tokens // MIN_TOKENS, PARTS_PER_STAGE * pipeline.num_stages)
    if count < 2:
        return [step]
    ends = [step.num_tokens * part // count for part in range(count + 1)]
    return [rows_of(step, a, b) for a, b in zip(ends, ends[1:], strict=False)]


def rows_of(step: StepInput, start: int, stop: int) -> StepInput:
    """What a forward pass needs to know of the tokens from `start` to before `stop`."""
    begins_R, ends_R = step.query_starts_R1[:-1], step.query_starts_R1[1:]
    low_R, high_R = np.maximum(begins_R, start), np.minimum(ends_R, stop)
    chosen = np.flatnonzero(low_R < high_R)
    counts_R = (high_R - low_R)[chosen]
    starts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(counts_R, out=starts[1:])
    adapters_T = step.adapter_slots_T
    contexts_R = step.context_lengths_R[chosen] - (ends_R - high_R)[chosen]
    return replace(
        step,
        token_ids_T=step.token_ids_T[start:stop],
        positions_T=step.positions_T[start:stop],
        slots_T=step.slots_T[start:stop],
        adapter_slots_T=None if adapters_T is None else adapters_T[start:stop],
        block_tables_RX=step.block_tables_RX[chosen],
        query_starts_R1=starts,
        context_lengths_R=contexts_R.astype(np.int32),
        max_query_len=int(counts_R.max()),
        max_context_len=int(contexts_R.max()),
    )
