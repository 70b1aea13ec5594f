"""Division of a step's requests: long chunks one by one, the others together.

Layers with latents compute a chunk of many rows over keys of heads, which they expand for one
request at a time. Legend: T tokens of the step, R requests, X pages.
"""

import numpy as np
import torch

from qkernels.attention.cache import AttentionStep
from qkernels.latent.expanded import ExpandedChunk, key_page_size
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device
from qserve.model.blocks.attention import SplitStep


def split_step(
    step: StepInput, device: torch.device, min_rows: int, page_size: int
) -> SplitStep | None:
    """Divide a step by the rows of its requests; None if none has `min_rows`."""
    counts_R = np.diff(step.query_starts_R1)
    is_long_R = counts_R >= min_rows
    if not is_long_R.any():
        return None
    expanded = tuple(
        _expanded_chunk(step, int(request), device, page_size)
        for request in np.flatnonzero(is_long_R)
    )
    others = np.flatnonzero(~is_long_R & (counts_R > 0))
    rows_T = np.flatnonzero(np.repeat(~is_long_R, counts_R))
    return SplitStep(
        expanded=expanded,
        others=_step_of(step, others, device) if len(others) else None,
        other_rows=to_device(rows_T, device),
    )


def _expanded_chunk(
    step: StepInput, request: int, device: torch.device, page_size: int
) -> ExpandedChunk:
    start, stop = (int(each) for each in step.query_starts_R1[request : request + 2])
    context, size = int(step.context_lengths_R[request]), key_page_size(page_size)
    # Warm-up steps have one request, whose kernels are those of a longer context.
    keys = context if step.num_requests > 1 else step.max_context_len
    num_pages = -(-keys // size)  # of keys
    pages = step.block_tables_RX[request, : -(-keys // page_size)].astype(np.int64)
    rest = num_pages * size // page_size - len(pages)
    return ExpandedChunk(
        rows=slice(start, stop),
        pages_X=to_device(np.pad(pages, (0, max(0, rest)), mode="edge"), device),
        step=AttentionStep(
            block_tables_RX=to_device(np.arange(num_pages, dtype=np.int32)[None], device),
            query_starts_R1=to_device(np.array([0, stop - start], np.int32), device),
            context_lengths_R=to_device(np.array([context], np.int32), device),
            max_query_len=stop - start,
            max_context_len=keys,
        ),
    )


def _step_of(step: StepInput, chosen: np.ndarray, device: torch.device) -> AttentionStep:
    """The step of some requests alone, whose rows follow one another."""
    counts, contexts = np.diff(step.query_starts_R1)[chosen], step.context_lengths_R[chosen]
    starts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return AttentionStep(
        block_tables_RX=to_device(step.block_tables_RX[chosen], device),
        query_starts_R1=to_device(starts, device),
        context_lengths_R=to_device(contexts, device),
        max_query_len=int(counts.max()),
        max_context_len=int(contexts.max()),
    )
