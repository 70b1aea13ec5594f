"""Microbatches of a step, so that pipeline stages compute different microbatches at the same time.

Microbatches keep the order of the step's tokens: the keys that a later microbatch attends to are
written before it runs, and the states that it continues are updated. T: tokens of the step. R:
requests (chunks).
"""

from dataclasses import dataclass, replace

import numpy as np

from qserve.engine.step.device_step import Batch, BatchForm
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device
from qserve.parallel.pipeline import Pipeline

# With fewer tokens a forward pass is bound by reading the weights, and each microbatch reads them.
MIN_TOKENS = 256
PER_STAGE = 2  # maximum number of microbatches per pipeline stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Inputs of a forward pass for a range of a step's tokens."""

    tokens: slice
    requests: np.ndarray  # int64: indices of its requests in the step
    later: np.ndarray  # int32: number of tokens of each of these in later microbatches
    step: StepInput
    embeds: slice  # range of the step's rows with media embeddings

    def batch_of(self, whole: Batch, form: BatchForm) -> Batch:
        """Create the microbatch's inputs on the device.

        `whole`: inputs of the whole step; values that only the device knows are taken from there.
        """
        device, tokens = whole.token_ids_T.device, self.tokens
        contexts_R = whole.context_lengths_R[to_device(self.requests, device)]
        keys_T, ropes_T = whole.last_keys_T, whole.rope_positions_T
        unlimited_T = whole.unlimited_T
        row_ropes, embeds = whole.row_ropes, whole.embeds
        return replace(
            Batch.of(self.step, device, form),
            token_ids_T=whole.token_ids_T[tokens],
            positions_T=whole.positions_T[tokens],
            slots_T=whole.slots_T[tokens],
            context_lengths_R=contexts_R - to_device(self.later, device),
            last_keys_T=None if keys_T is None else keys_T[tokens],
            sees_ahead_in_windows=whole.sees_ahead_in_windows,
            unlimited_T=None if unlimited_T is None else unlimited_T[tokens],
            rope_positions_T=None if ropes_T is None else ropes_T[tokens],
            row_ropes=None if row_ropes is None else row_ropes.of_rows(tokens),
            embeds=None if embeds is None else embeds.part(self.embeds, tokens.start),
            num_levels=whole.num_levels,
        )


def microbatches(step: StepInput, pipeline: Pipeline, max_whole_rows: int = 0) -> list[Microbatch]:
    """Divide a step into microbatches. Returns an empty list if the step is too short.

    `max_whole_rows`: chunks of up to so many rows are not divided.
    """
    count = min(step.num_tokens // MIN_TOKENS, PER_STAGE * pipeline.num_stages)
    if count < 2:
        return []
    ends = [step.num_tokens * part // count for part in range(count + 1)]
    if step.media is not None and step.media.keys_ahead_T is not None:
        ends = _outside_images(ends, step.media.keys_ahead_T)
    if max_whole_rows > 1:
        ends = _outside_chunks(ends, step.query_starts_R1, max_whole_rows)
    return [microbatch_of(step, a, b) for a, b in zip(ends, ends[1:], strict=False)]


def _outside_images(ends: list[int], keys_ahead_T: np.ndarray) -> list[int]:
    """Move ends that lie within an image to the image's start: its rows attend to each other."""
    found = [0]
    for end in ends[1:]:
        while end > found[-1] and keys_ahead_T[end - 1]:
            end -= 1
        if end > found[-1]:
            found.append(end)
    return found


def _outside_chunks(ends: list[int], starts_R1: np.ndarray, max_rows: int) -> list[int]:
    """Move ends that lie within a chunk of up to `max_rows` rows to the chunk's start.

    Such a chunk may be a verification, whose rows are not applied to the states. Only all its rows
    together are recognized as one.
    """
    found = [0]
    for end in ends[1:]:
        r = int(np.searchsorted(starts_R1, end, "right")) - 1
        if r < len(starts_R1) - 1 and starts_R1[r + 1] - starts_R1[r] <= max_rows:
            end = int(starts_R1[r])
        if end > found[-1]:
            found.append(end)
    return found


def microbatch_of(step: StepInput, start: int, stop: int) -> Microbatch:
    """Return the microbatch of the tokens [start, stop)."""
    begins_R, ends_R = step.query_starts_R1[:-1], step.query_starts_R1[1:]
    low_R, high_R = np.maximum(begins_R, start), np.minimum(ends_R, stop)
    chosen = np.flatnonzero(low_R < high_R)
    counts_R = (high_R - low_R)[chosen]
    starts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(counts_R, out=starts[1:])
    adapters_T, media_T = step.adapter_slots_T, step.is_media_T
    later_R = (ends_R - high_R)[chosen].astype(np.int32)
    contexts_R = step.context_lengths_R[chosen] - later_R
    part = replace(
        step,
        token_ids_T=step.token_ids_T[start:stop],
        positions_T=step.positions_T[start:stop],
        slots_T=step.slots_T[start:stop],
        adapter_slots_T=None if adapters_T is None else adapters_T[start:stop],
        is_media_T=None if media_T is None else media_T[start:stop],
        block_tables_RX=step.block_tables_RX[chosen],
        query_starts_R1=starts,
        context_lengths_R=contexts_R,
        state_slots_R=step.state_slots_R[chosen],
        max_query_len=int(counts_R.max()),
        max_context_len=int(contexts_R.max()),
    )
    rows_M = np.zeros(0, np.int64) if step.media is None else step.media.rows_M
    return Microbatch(
        tokens=slice(start, stop),
        requests=chosen,
        later=later_R,
        step=part,
        embeds=slice(*np.searchsorted(rows_M, (start, stop)).tolist()),
    )
