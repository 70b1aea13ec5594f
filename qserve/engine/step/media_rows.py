"""MediaRows: the rows of a step whose embeddings come from an encoder. M: number of such rows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qserve.engine.scheduling.encoder_budget import MediaPlan
from qserve.engine.scheduling.plan import StepPlan
from qserve.multimodal.media import MediaItem


class ItemRows(NamedTuple):
    """Consecutive embeddings [start, stop) of one media item."""

    digest: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRows:
    """Encoder work of a step, and the rows that get the embeddings."""

    dropped: tuple[str, ...]  # digests whose embeddings are freed first
    encode: tuple[MediaItem, ...]  # items to encode
    rows_M: np.ndarray  # int64: rows of the step that get embeddings
    of_items: tuple[ItemRows, ...]  # the embeddings of these rows, in order
    # For a drafter: rows whose next token has an embedding, which may be after the chunk.
    before_M: np.ndarray  # int64
    of_next: tuple[ItemRows, ...]  # the embeddings that follow these rows, in order
    # int64 [T]: number of keys after its own that each row attends to; None: no such keys. These
    # are counts, because with drafts only the device knows the positions.
    keys_ahead_T: np.ndarray | None = None
    # bool [T]: rows of prompts that are one item, which no window limits; None: no such rows
    unlimited_T: np.ndarray | None = None

    @classmethod
    def build(cls, plan: StepPlan, media: MediaPlan) -> "MediaRows":
        """Find the rows of a plan that have media embeddings."""
        rows: list[np.ndarray] = []
        found: list[ItemRows] = []
        before: list[np.ndarray] = []
        of_next: list[ItemRows] = []
        mutual: list[tuple[np.ndarray, np.ndarray]] = []  # rows, and numbers of keys ahead
        prompts: list[np.ndarray] = []  # rows of prompts that are one item
        first = 0  # row of the chunk's first token
        for request, start, count, _ in plan.chunks:
            for item in request.media:
                if item.end <= start or item.offset > start + count:
                    continue
                positions = item.embed_positions()
                if item.digest in media.for_drafts:
                    ends = start + 1, start + count + 1
                    low, high = np.searchsorted(positions, ends).tolist()
                    if low < high:
                        before.append(positions[low:high] - start - 1 + first)
                        of_next.append(ItemRows(item.digest, low, high))
                low, high = np.searchsorted(positions, (start, start + count)).tolist()
                if low < high:
                    rows.append(positions[low:high] - start + first)
                    found.append(ItemRows(item.digest, low, high))
                if item.is_mutual:
                    span = np.arange(max(start, item.offset), min(start + count, item.end))
                    mutual.append((span - start + first, item.end - 1 - span))
                    if item.offset == 0:
                        prompts.append(span - start + first)
            first += count
        keys_ahead_T = None
        if mutual:
            keys_ahead_T = np.zeros(first, np.int64)
            for chosen, ahead in mutual:
                keys_ahead_T[chosen] = ahead
        unlimited_T = None
        if prompts:
            unlimited_T = np.zeros(first, bool)
            unlimited_T[np.concatenate(prompts)] = True
        return cls(
            dropped=media.dropped,
            encode=media.encode,
            rows_M=np.concatenate(rows) if rows else np.zeros(0, np.int64),
            of_items=tuple(found),
            before_M=np.concatenate(before) if before else np.zeros(0, np.int64),
            of_next=tuple(of_next),
            keys_ahead_T=keys_ahead_T,
            unlimited_T=unlimited_T,
        )


def axis_positions(plan: StepPlan, positions_T: np.ndarray) -> np.ndarray | None:
    """Return int64 [A, T], the positions of a step's rows on A axes; None if all are equal.

    For rows before the end of a request's media, fills in `positions_T` with the first axis.
    """
    pieces: list[tuple[int, np.ndarray]] = []
    first = 0  # row of the chunk's first token
    for request, start, count, _ in plan.chunks:
        if request.rope_positions is not None and start < request.media_end:
            known_AN = request.rope_positions[:, start : start + count]
            positions_T[first : first + known_AN.shape[1]] = known_AN[0]
            pieces.append((first, known_AN))
        first += count
    if all((known_AN == known_AN[0]).all() for _, known_AN in pieces):
        return None
    found_AT = np.tile(positions_T, (len(pieces[0][1]), 1))
    for first, known_AN in pieces:
        found_AT[:, first : first + known_AN.shape[1]] = known_AN
    return found_AT


def media_tokens(plan: StepPlan) -> np.ndarray | None:
    """Return bool [T], the prompt tokens for which the model has other experts; None: none."""
    found: list[np.ndarray] = []
    for request, start, count, _ in plan.chunks:
        known_N = np.zeros(0, bool) if request.is_media_N is None else request.is_media_N
        part = known_N[start : start + count]
        found.append(np.pad(part, (0, count - len(part))))
    found_T = np.concatenate(found)
    return found_T if found_T.any() else None
