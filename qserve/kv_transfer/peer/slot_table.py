"""SlotTable: which page each slot of a transfer buffer has, and how many layers are complete.

The slots are a ring: page number i is written to slot i mod S, so a page is valid until S more
pages were begun after it. A reader copies a slot without a lock and then reads `begun` again: the
copy is valid if the slot was not reused meanwhile. So a reader that dies holds no lock, and a
writer never waits.

    begun | entries [S] | progress [S]
"""

import mmap
import zlib

import numpy as np

from qserve.kv_transfer.peer.layout import BufferFacts

# `number`: number of the page. `batch`: distinguishes successive uses of a slot (see progress).
ENTRY = np.dtype([("key", "S32"), ("number", "<u8"), ("batch", "<u8"), ("check", "<u8")])
ENTRIES = 64  # offset of the entries in bytes
LAYER_BITS = 16  # bits of a progress word for the layer count; the other bits are the batch


class SlotTable:
    """A view of a table's bytes, for the engine that writes it and for engines that read it."""

    def __init__(self, facts: BufferFacts, buffer: memoryview | mmap.mmap, start: int = 0) -> None:
        """`start`: offset of the table in `buffer`."""
        self.facts, count = facts, facts.num_slots
        self._begun = np.frombuffer(buffer, "<u8", 1, start)
        self._entries = np.frombuffer(buffer, ENTRY, count, start + ENTRIES)
        # int64: batch << LAYER_BITS | number of layers that are complete
        self.progress = np.frombuffer(buffer, "<i8", count, start + progress_offset(count))

    @property
    def begun(self) -> int:
        """Number of pages that were begun so far."""
        return int(self._begun[0])

    def begin(self, keys: list[bytes], batch: int) -> int:
        """Assign the next slots to these pages. Returns the first page's number.

        Call this before overwriting the slots.
        """
        first, count = self.begun, self.facts.num_slots
        self._begun[0] = first + len(keys)
        for number, key in enumerate(keys, first):
            entry = (key, number, batch, _check(key, number, batch))
            self._entries[number % count] = entry
        return first

    def invalidate(self) -> None:
        """Make all pages invalid, because one of them will not become complete."""
        self.begin([bytes(32)] * self.facts.num_slots, batch=0)

    def entry(self, number: int) -> tuple[bytes, int] | None:
        """Return key and batch of a page; None if not written yet, or if its slot was reused."""
        found = self._entries[number % self.facts.num_slots].copy()
        key, batch = bytes(found["key"]).ljust(32, b"\0"), int(found["batch"])
        if int(found["number"]) != number or int(found["check"]) != _check(key, number, batch):
            return None
        return key, batch

    def is_valid(self, number: int) -> bool:
        """Return True if the page's slot was not reused."""
        return number + self.facts.num_slots >= self.begun

    def num_layers(self, number: int, count: int, batch: int) -> int:
        """Return how many layers are complete of `count` pages of a batch in consecutive slots."""
        start = number % self.facts.num_slots
        words = self.progress[start : start + count]
        least, most = int(words.min()), int(words.max())
        if not least >> LAYER_BITS == most >> LAYER_BITS == batch:
            return 0
        return least & ((1 << LAYER_BITS) - 1)

    @property
    def is_alive(self) -> bool:
        """True if the writer is alive. For readers."""
        return True

    def pull(self, first_page: int | None = None) -> None:
        """Update a reader's copy of the table; entries only from `first_page` on, unless None.

        Raises TransferError. A table in mapped memory is always up to date.
        """

    def close(self) -> None:
        """Release the memory. Readers notice that a writer is gone."""
        del self._begun, self._entries, self.progress


def progress_offset(num_slots: int) -> int:
    """Return the offset of the progress words."""
    return ENTRIES + num_slots * ENTRY.itemsize


def table_bytes(num_slots: int) -> int:
    """Return the size of a table in bytes."""
    return progress_offset(num_slots) + 8 * num_slots


def _check(key: bytes, number: int, batch: int) -> int:
    """Return a checksum, with which a reader detects an entry that was read during its write."""
    words = number.to_bytes(8, "little") + batch.to_bytes(8, "little")
    return zlib.crc32(words, zlib.crc32(key)) + 1  # never 0, which an empty entry has
