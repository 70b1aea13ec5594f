"""SlotTable: which page each slot of a transfer buffer holds, and how much of it is there.

The slots are a ring: page number i of a buffer is written to slot i mod S, so it is valid while
fewer than S pages were begun after it. A reader copies a slot without any lock and then looks at
`begun` again: the copy is valid if the slot was not given to another page meanwhile. So a reader
that dies holds nothing, and a writer never waits.

    begun | entries [S] | progress [S]
"""

import mmap
import zlib

import numpy as np

from qserve.kv_transfer.peer.layout import BufferFacts

# `number` is the page's; `batch` distinguishes the copies that a slot receives (see progress)
ENTRY = np.dtype([("key", "S32"), ("number", "<u8"), ("batch", "<u8"), ("check", "<u8")])
ENTRIES = 64  # bytes before them
LAYER_BITS = 16  # of a progress word; the rest is the batch


class SlotTable:
    """View of a table's bytes, by the engine that writes it or by one that reads it."""

    def __init__(self, facts: BufferFacts, buffer: memoryview | mmap.mmap, start: int = 0) -> None:
        """`start`: offset of the table in `buffer`."""
        self.facts, count = facts, facts.num_slots
        self._begun = np.frombuffer(buffer, "<u8", 1, start)
        self._entries = np.frombuffer(buffer, ENTRY, count, start + ENTRIES)
        # int64: batch << LAYER_BITS | number of layers that are complete
        self.progress = np.frombuffer(buffer, "<i8", count, start + progress_offset(count))

    @property
    def begun(self) -> int:
        """Number of pages whose slots were taken."""
        return int(self._begun[0])

    def begin(self, keys: list[bytes], batch: int) -> int:
        """Take the next slots for these pages. Returns the first page's number.

        Call it before a slot is overwritten.
        """
        first, count = self.begun, self.facts.num_slots
        self._begun[0] = first + len(keys)
        for number, key in enumerate(keys, first):
            entry = (key, number, batch, _check(key, number, batch))
            self._entries[number % count] = entry
        return first

    def invalidate(self) -> None:
        """Make all pages invalid: one of them will not become complete."""
        self.begin([bytes(32)] * self.facts.num_slots, batch=0)

    def entry(self, number: int) -> tuple[bytes, int] | None:
        """Key and batch of a page; None: it is not written yet, or its slot has another page."""
        found = self._entries[number % self.facts.num_slots].copy()
        key, batch = bytes(found["key"]).ljust(32, b"\0"), int(found["batch"])
        if int(found["number"]) != number or int(found["check"]) != _check(key, number, batch):
            return None
        return key, batch

    def is_valid(self, number: int) -> bool:
        """True if the page's slot was not given to another page."""
        return number + self.facts.num_slots >= self.begun

    def num_layers(self, number: int, count: int, batch: int) -> int:
        """Number of complete layers of pages in successive slots, copied in one batch."""
        start = number % self.facts.num_slots
        words = self.progress[start : start + count]
        least, most = int(words.min()), int(words.max())
        if not least >> LAYER_BITS == most >> LAYER_BITS == batch:
            return 0
        return least & ((1 << LAYER_BITS) - 1)

    @property
    def is_alive(self) -> bool:
        """For readers: True if the writer lives."""
        return True

    def pull(self, first_page: int | None = None) -> None:
        """For readers: renew what may have changed, and the entries from a page's number on.

        Raises TransferError. A table in mapped memory is always new.
        """

    def close(self) -> None:
        """End the use of the memory. A writer's readers see that it is gone."""
        del self._begun, self._entries, self.progress


def progress_offset(num_slots: int) -> int:
    """Start of the progress words."""
    return ENTRIES + num_slots * ENTRY.itemsize


def table_bytes(num_slots: int) -> int:
    """Size of a table."""
    return progress_offset(num_slots) + 8 * num_slots


def _check(key: bytes, number: int, batch: int) -> int:
    """Checksum by which a reader sees that it read an entry while it was written."""
    words = number.to_bytes(8, "little") + batch.to_bytes(8, "little")
    return zlib.crc32(words, zlib.crc32(key)) + 1  # an empty entry has 0
