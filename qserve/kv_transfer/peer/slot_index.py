"""SlotIndex: the slot table of a transfer buffer, in a file that other processes map.

    MAGIC | length of the facts | facts (JSON) | begun | entries [S] | progress [S]

The writer holds a lock on the file while it is alive. If a reader can get the lock, the writer is
gone.
"""

import contextlib
import fcntl
import mmap
import os
from pathlib import Path

import msgspec

from qserve.kv_transfer.peer.layout import BufferFacts
from qserve.kv_transfer.peer.slot_table import SlotTable, table_bytes

MAGIC = b"qserveP1"
SUFFIX, PARTIAL = ".pages", ".partial"
STATES_SUFFIX = ".states"  # for a buffer of states
MAX_FACTS_BYTES = 2**24
PAGE = 4096


class IndexFileError(Exception):
    """The file is not a complete index."""


class SlotIndex(SlotTable):
    """A mapped index file. The writer calls `create`, readers call `open`."""

    def __init__(self, path: Path, file: int, facts: BufferFacts, start: int, *, writes: bool):
        self.path, self._file = path, file
        size = start + table_bytes(facts.num_slots)
        access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
        self._map, self._writes = mmap.mmap(file, size, access=access), writes
        super().__init__(facts, self._map, start)

    @classmethod
    def create(cls, path: Path, facts: BufferFacts) -> "SlotIndex":
        """Create and lock the file. The file gets its final name when it is complete."""
        text = msgspec.json.encode(facts)
        start = -(-(len(MAGIC) + 8 + len(text)) // PAGE) * PAGE
        partial = path.with_name(path.name + PARTIAL)
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, start + table_bytes(facts.num_slots))
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
            if os.fstat(file).st_size != start + table_bytes(facts.num_slots):
                raise IndexFileError("has another size than its description says")
            return cls(path, file, facts, start, writes=False)
        except BaseException:
            os.close(file)
            raise

    @property
    def is_alive(self) -> bool:
        """True if the writer is alive. For readers."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Unmap the file. The writer also removes it."""
        if self._writes:
            self.path.unlink(missing_ok=True)
        super().close()
        with contextlib.suppress(BufferError):  # a view still exists; it keeps the map until then
            self._map.close()
        os.close(self._file)
