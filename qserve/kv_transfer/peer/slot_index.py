"""SlotIndex: which page each slot of a transfer buffer holds, in a file that other processes map.

The slots are a ring: page number i of a buffer is written to slot i mod S, so it is valid while
fewer than S pages were begun after it. A reader copies a slot without any lock and then looks at
`begun` again: the copy is valid if the slot was not given to another page meanwhile. So a reader
that dies holds nothing, and a writer never waits.

    MAGIC | length of the facts | facts (JSON) | begun | entries [S] | progress [S]

The writer holds a lock of the file for as long as it lives: a lock that can be had means that the
writer is gone, whatever the reason.
"""

import contextlib
import fcntl
import mmap
import os
import zlib
from pathlib import Path

import msgspec
import numpy as np

from qserve.kv_transfer.peer.layout import BufferFacts

MAGIC = b"qserveP1"
SUFFIX, PARTIAL = ".pages", ".partial"
MAX_FACTS_BYTES = 2**24
PAGE = 4096
# `number` is the page's; `batch` distinguishes the copies that a slot receives (see progress)
ENTRY = np.dtype([("key", "S32"), ("number", "<u8"), ("batch", "<u8"), ("check", "<u8")])
LAYER_BITS = 16  # of a progress word; the rest is the batch


class IndexFileError(Exception):
    """The file is not an index, or not a complete one."""


class SlotIndex:
    """The mapped file. A writer makes it with `create`, readers `open` it."""

    def __init__(self, path: Path, file: int, facts: BufferFacts, start: int, *, writes: bool):
        self.path, self.facts, self._file = path, facts, file
        size = start + _sizes(facts.num_slots)
        access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
        self._map = mmap.mmap(file, size, access=access)
        count = facts.num_slots
        self._begun = np.frombuffer(self._map, "<u8", 1, start)
        entries = start + 64
        self._entries = np.frombuffer(self._map, ENTRY, count, entries)
        # int64: batch << LAYER_BITS | number of layers that are complete
        self.progress = np.frombuffer(self._map, "<i8", count, entries + count * ENTRY.itemsize)

    @classmethod
    def create(cls, path: Path, facts: BufferFacts) -> "SlotIndex":
        """Make the file and lock it. It gets its name when it is complete."""
        text = msgspec.json.encode(facts)
        start = -(-(len(MAGIC) + 8 + len(text)) // PAGE) * PAGE
        partial = path.with_suffix(PARTIAL)
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, start + _sizes(facts.num_slots))
            os.pwrite(file, MAGIC + len(text).to_bytes(8, "little") + text, 0)
            made = cls(path, file, facts, start, writes=True)
            os.rename(partial, path)
            return made
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise

    @classmethod
    def open(cls, path: Path) -> "SlotIndex":
        """Map the file of another process. Raises IndexFileError or OSError."""
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_uid != os.getuid():
                raise IndexFileError("belongs to another user")
            head = os.pread(file, len(MAGIC) + 8, 0)
            length = int.from_bytes(head[len(MAGIC) :], "little")
            if not head.startswith(MAGIC) or not 0 < length <= MAX_FACTS_BYTES:
                raise IndexFileError("is not an index of KV pages")
            try:
                facts = msgspec.json.decode(os.pread(file, length, len(head)), type=BufferFacts)
            except msgspec.MsgspecError as error:
                raise IndexFileError(f"has no valid description: {error}") from None
            start = -(-(len(head) + length) // PAGE) * PAGE
            if os.fstat(file).st_size != start + _sizes(facts.num_slots):
                raise IndexFileError("has another size than its description says")
            return cls(path, file, facts, start, writes=False)
        except BaseException:
            os.close(file)
            raise

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
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Unmap the file."""
        del self._begun, self._entries, self.progress
        with contextlib.suppress(BufferError):  # somebody holds a view: it ends with that
            self._map.close()
        os.close(self._file)


def _sizes(num_slots: int) -> int:
    return 64 + num_slots * (ENTRY.itemsize + 8)


def _check(key: bytes, number: int, batch: int) -> int:
    """Checksum by which a reader sees that it read an entry while it was written."""
    words = number.to_bytes(8, "little") + batch.to_bytes(8, "little")
    return zlib.crc32(words, zlib.crc32(key)) + 1  # an empty entry has 0
