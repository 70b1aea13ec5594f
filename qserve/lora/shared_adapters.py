"""SharedAdapters: the leader's access to adapters that are sharded over all ranks.

Every rank reads the adapter's folder itself, in a thread, while steps run, and stores its shard
under a number. An adapter is loaded when all ranks have read the same values; otherwise no rank
keeps it. With a single rank it works the same way.
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
    """An adapter that every rank keeps in host memory while this object exists."""

    number: int
    digest: str  # digest of all values; adapters with equal digests give equal results


class OtherRanks(Protocol):
    """The ranks other than the leader. RankGroup of the engine implements this."""

    def begin(self, name: str, *values: Any) -> list[Future]:
        """Start a call on each rank. Returns the futures of the results."""

    def send(self, name: str, *values: Any) -> None:
        """Send a call to each rank, in order with the steps."""


class SharedAdapters:
    """The adapters of all ranks of an engine."""

    def __init__(self, ours: RankAdapters, rank_group: OtherRanks | None) -> None:
        """`ours`: the leader's adapters. `rank_group`: the other ranks; None: one rank."""
        self._ours, self._rank_group = ours, rank_group
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()  # dropped numbers, not yet sent to the other ranks

    def read(self, path: str, is_wanted: Callable[[], bool] = lambda: True) -> SharedAdapter:
        """Read an adapter's folder on all ranks, and wait. Any thread may call this.

        Raises InputError, also if `is_wanted` returns False before the end.
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
                future.exception()  # wait, so that ranks drop the adapter after reading it
            self._forget(number)
            raise
        adapter = SharedAdapter(number, digest)
        weakref.finalize(adapter, self._forget, number).atexit = False
        return adapter

    def place(self, slot: int, adapter: SharedAdapter) -> None:
        """Copy an adapter to a slot on all ranks, after all launched steps."""
        self._tell_forgotten()
        if self._rank_group is not None:
            self._rank_group.send("place_adapter", slot, adapter.number)
        self._ours.place(slot, adapter.number)

    def _forget(self, number: int) -> None:
        self._ours.forget(number)
        # The garbage collector may call this while a message is being sent, so send it later.
        if self._rank_group is not None:
            self._forgotten.append(number)

    def _tell_forgotten(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may have sent the last one
            while self._forgotten:
                self._rank_group.send("forget_adapter", self._forgotten.popleft())
