"""Split of a step's requests into those with long chunks and the others.

Latent attention layers expand the latents of requests with long chunks to keys per head, which is
faster for many rows. T: tokens of the step. R: requests. X: pages.
"""

import numpy as np
import torch

from qkernels.attention.cache import AttentionStep
from qkernels.latent.expanded import MAX_KEYS, ExpandedChunks, key_page_size
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device
from qserve.model.blocks.attention import SplitStep
from qserve.model.cache_spec import SplitRule


def split_step(
    step: StepInput, device: torch.device, rule: SplitRule, page_size: int
) -> SplitStep | None:
    """Split a step. Returns None if its long chunks have fewer pairs than the rule requires."""
    if long_pairs(step, rule) < rule.pairs:
        return None
    counts_R = np.diff(step.query_starts_R1)
    is_long_R = counts_R >= rule.rows
    others = np.flatnonzero(~is_long_R & (counts_R > 0))
    return SplitStep(
        expanded=tuple(
            _expanded(step, group, device, page_size)
            for group in _groups(np.flatnonzero(is_long_R), _keys(step))
        ),
        others=_step_of(step, others, step.block_tables_RX[others], device)
        if len(others)
        else None,
        other_rows=_rows_of(np.repeat(~is_long_R, counts_R), device),
    )


def long_pairs(step: StepInput, rule: SplitRule) -> int:
    """Return the sum of rows times keys over the chunks that are long according to the rule."""
    if step.max_query_len < rule.rows:
        return 0
    counts_R = np.diff(step.query_starts_R1).astype(np.int64)
    pairs_R = counts_R * _keys(step)
    return int(pairs_R[counts_R >= rule.rows].sum())


def _keys(step: StepInput) -> np.ndarray:
    """Return the number of keys of each request.

    A warm-up step has one request, and its max_context_len may exceed the request's context.
    """
    if step.num_requests == 1:
        return np.array([step.max_context_len], np.int64)
    return step.context_lengths_R.astype(np.int64)


def _groups(chosen: np.ndarray, keys_R: np.ndarray) -> list[np.ndarray]:
    """Divide requests into groups of up to MAX_KEYS keys. A longer request is its own group."""
    groups: list[list[int]] = []
    total = MAX_KEYS
    for request in chosen.tolist():
        total += int(keys_R[request])
        if total > MAX_KEYS:
            groups.append([])
            total = int(keys_R[request])
        groups[-1].append(request)
    return [np.array(group) for group in groups]


def _rows_of(chosen_T: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Return the chosen rows: as a slice if they are consecutive, else as an index tensor."""
    rows = np.flatnonzero(chosen_T)
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return to_device(rows, device)


def _expanded(
    step: StepInput, chosen: np.ndarray, device: torch.device, page_size: int
) -> ExpandedChunks:
    size, keys_R = key_page_size(page_size), _keys(step)[chosen]
    key_pages_R = -(-keys_R // size)
    firsts_R = np.cumsum(key_pages_R) - key_pages_R
    pages = [
        _filled(step.block_tables_RX[request, : -(-keys // page_size)], count * size // page_size)
        for request, keys, count in zip(chosen, keys_R, key_pages_R, strict=True)
    ]
    # page numbers beyond a request's last page are never read
    tables_RX = (firsts_R[:, None] + np.arange(key_pages_R.max())).astype(np.int32)
    is_chosen_R = np.isin(np.arange(step.num_requests), chosen)
    return ExpandedChunks(
        rows=_rows_of(np.repeat(is_chosen_R, np.diff(step.query_starts_R1)), device),
        pages_X=to_device(np.concatenate(pages), device),
        step=_step_of(step, chosen, tables_RX, device),
    )


def _filled(pages: np.ndarray, count: int) -> np.ndarray:
    """Return at least `count` pages. The last page is repeated if necessary."""
    return np.pad(pages.astype(np.int64), (0, max(0, count - len(pages))), mode="edge")


def _step_of(
    step: StepInput, chosen: np.ndarray, tables_RX: np.ndarray, device: torch.device
) -> AttentionStep:
    """Return the attention step of the chosen requests only, with their rows consecutive."""
    counts = np.diff(step.query_starts_R1)[chosen]
    starts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return AttentionStep(
        block_tables_RX=to_device(tables_RX, device),
        query_starts_R1=to_device(starts, device),
        context_lengths_R=to_device(step.context_lengths_R[chosen], device),
        max_query_len=int(counts.max()),
        max_context_len=int(_keys(step)[chosen].max()),
    )
