"""EncoderBudget: decides which media items a step encodes, and which embeddings the device keeps.

The unit is rows: one row is one embedding. An item is encoded whole, in the step that first needs
one of its rows; a chunk ends before an item that does not fit into the step. Embeddings are kept by
digest. When others need the room, the least recently used embeddings are dropped; if a request
needs a dropped item, the item is encoded again.
"""

from collections import OrderedDict
from typing import NamedTuple

from qserve.engine.request import Request
from qserve.multimodal.media import MediaItem


class MediaPlan(NamedTuple):
    """Encoder work of a step."""

    encode: tuple[MediaItem, ...]
    dropped: tuple[str, ...]  # digests of items whose embeddings are freed first
    for_drafts: frozenset[str]  # digests of items that a drafter may read


class EncoderBudget:
    """Limits the rows that a step encodes and the rows that the device keeps."""

    def __init__(self, rows_per_step: int, capacity: int, *, looks_ahead: bool = False) -> None:
        """`capacity`: maximum number of rows on the device. A single item may exceed both limits.

        `looks_ahead`: True if a drafter also reads the embedding after a chunk.
        """
        self._rows_per_step, self._capacity = rows_per_step, capacity
        self._looks_ahead = looks_ahead
        self._kept: OrderedDict[str, int] = OrderedDict()  # digest -> rows, last used last
        self._num_kept = 0
        self._dropped: list[str] = []  # digests dropped since the last step
        self._encode: list[MediaItem] = []  # items that the step being planned encodes
        self._num_encoded = 0
        self._used: set[str] = set()  # digests that this step reads

    @property
    def num_kept(self) -> int:
        """Number of rows on the device."""
        return self._num_kept

    def begin_step(self) -> None:
        """Start planning a new step."""
        self._encode, self._num_encoded, self._used = [], 0, set()

    def take(self, request: Request, start: int, count: int) -> int:
        """Plan to encode the media items among the `count` tokens from `start`, where they fit.

        Returns how many of these tokens the step can compute.
        """
        count = self._fitting(request, start, count)
        if self._looks_ahead and count:
            behind = start + count
            item = next((each for each in request.media if each.offset <= behind < each.end), None)
            # The drafter lacks this embedding, so the chunk's last row waits for the step that
            # encodes the item. A single row does not wait: two adjacent items may never be on the
            # device together.
            if item is not None and not self._make_readable(item) and count > 1:
                return count - 1
        return count

    def _fitting(self, request: Request, start: int, count: int) -> int:
        for item in request.media:
            if item.end <= start:
                continue
            if item.offset >= start + count:
                break
            if item.is_mutual and item.end > start + count:
                return max(0, item.offset - start)  # its rows attend to each other, in one step
            if not self._make_readable(item):
                return max(0, item.offset - start)
        return count

    def end_step(self) -> MediaPlan | None:
        """Return the step's encoder work; None if it reads and frees no embedding."""
        if not (self._used or self._dropped):
            return None
        plan = MediaPlan(
            encode=tuple(self._encode),
            dropped=tuple(self._dropped),
            for_drafts=frozenset(self._used if self._looks_ahead else ()),
        )
        self._dropped = []
        return plan

    def reset(self) -> None:
        """Drop all embeddings, because a step failed and may not have made all of them."""
        self._dropped += self._kept
        self._kept.clear()
        self._num_kept = 0

    def _make_readable(self, item: MediaItem) -> bool:
        """Plan to encode an item that the device lacks. Returns True if the step can read it."""
        digest, rows = item.digest, item.num_embeds
        if digest in self._kept:
            self._kept.move_to_end(digest)
            self._used.add(digest)
            return True
        if self._encode and self._num_encoded + rows > self._rows_per_step:
            return False
        if not self._make_room(rows):
            return False
        self._kept[digest] = rows
        self._num_kept += rows
        self._num_encoded += rows
        self._encode.append(item)
        self._used.add(digest)
        return True

    def _make_room(self, rows: int) -> bool:
        """Drop items that this step does not read, until `rows` more fit. Returns False if not.

        A single item may exceed the capacity.
        """
        while self._num_kept + rows > self._capacity:
            victim = next((each for each in self._kept if each not in self._used), None)
            if victim is None:
                return not self._kept
            self._num_kept -= self._kept.pop(victim)
            self._dropped.append(victim)
        return True
