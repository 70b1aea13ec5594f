"""SharedAdapters: the leader's access to adapters that are sharded over all ranks.

Every rank reads the folder itself, in a thread, while steps run, and numbers its shard.
An adapter is loaded when all ranks have read the same values; if one has not, no rank keeps it. A
single rank works the same way.
"""

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from formats.errors import InputError
from qserve.lora.rank_adapters import RankAdapters


@dataclass(frozen=True, eq=False)
class SharedAdapter:
    """Adapter that every rank keeps on its host for as long as this object lives."""

    number: int
    digest: str  # of all values: adapters with equal digests compute the same


class OtherRanks(Protocol):
    """Ranks of the model other than the leader (engine: RankGroup)."""

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Start a call on each rank. Returns the future results."""

    def tell(self, name: str, *values: Any) -> None:
        """Send a call to each rank, in the order of steps."""


class SharedAdapters:
    """Adapters of one engine's ranks."""

    def __init__(self, ours: RankAdapters, rank_group: OtherRanks | None) -> None:
        """`rank_group`: None with one rank."""
        self._ours, self._rank_group = ours, rank_group
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()  # not yet sent to the other ranks

    def read(self, path: str, is_wanted: Callable[[], bool] = lambda: True) -> SharedAdapter:
        """Let every rank read its shard of a folder, and wait. Any thread may call it.

        Raises InputError, also where `is_wanted` says no before the end.
        """
        number = next(self._numbers)
        self._tell_forgotten()
        theirs = (
            [] if self._rank_group is None else self._rank_group.begin("read_adapter", number, path)
        )
        try:
            digest = self._ours.read(number, path, is_wanted)
            for rank, future in enumerate(theirs, start=1):
                if future.result() != digest:
                    raise InputError(
                        path,
                        f"rank {rank} read other numbers there than rank 0",
                        "give a folder that is the same for all ranks and does not change",
                    )
        except BaseException:
            for future in theirs:
                future.exception()  # or it would be kept after it was forgotten
            self._forget(number)
            raise
        adapter = SharedAdapter(number, digest)
        weakref.finalize(adapter, self._forget, number).atexit = False
        return adapter

    def place(self, slot: int, adapter: SharedAdapter) -> None:
        """Fill a slot of every rank, after all launched steps."""
        self._tell_forgotten()
        if self._rank_group is not None:
            self._rank_group.tell("place_adapter", slot, adapter.number)
        self._ours.place(slot, adapter.number)

    def _forget(self, number: int) -> None:
        self._ours.forget(number)
        # The garbage collector may call this in the middle of a message, so it is sent later.
        if self._rank_group is not None:
            self._forgotten.append(number)

    def _tell_forgotten(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may have sent the last one
            while self._forgotten:
                self._rank_group.tell("forget_adapter", self._forgotten.popleft())
