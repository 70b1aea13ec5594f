"""SharedAdapters: the leader's way to the adapters that all ranks have parts of. Knows no tensors.

Every rank reads the folder itself, in a thread, while steps go on, and keeps its part under a
number. An adapter is there when all of them have read the same numbers; where one has not, nobody
keeps it. With one rank the way is the same.
"""

import contextlib
import itertools
import weakref
from collections import deque
from dataclasses import dataclass

from formats.errors import InputError
from qserve.engine.crew import Crew
from qserve.lora.rank_adapters import RankAdapters


@dataclass(frozen=True, eq=False)
class SharedAdapter:
    """An adapter that every rank has on its host, for as long as somebody holds this."""

    number: int
    digest: str  # of all its numbers: equal ones compute the same


class SharedAdapters:
    """Of one engine's ranks."""

    def __init__(self, ours: RankAdapters, crew: Crew | None) -> None:
        """`crew`: the other ranks; None: there are none."""
        self._ours, self._crew = ours, crew
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()  # of which the others have not been told

    def read(self, path: str) -> SharedAdapter:
        """Let every rank read its part of a folder, and wait. Any thread may. Raises InputError."""
        number = next(self._numbers)
        self._tell_forgotten()
        theirs = [] if self._crew is None else self._crew.begin("read_adapter", number, path)
        try:
            digest = self._ours.read(number, path)
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
        """Fill a slot of every rank, after the steps that were launched before."""
        self._tell_forgotten()
        if self._crew is not None:
            self._crew.tell("place_adapter", slot, adapter.number)
        self._ours.place(slot, adapter.number)

    def _forget(self, number: int) -> None:
        self._ours.forget(number)
        # A collection may call this in the middle of a message, so others are told later.
        if self._crew is not None:
            self._forgotten.append(number)

    def _tell_forgotten(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may have told of the last
            while self._forgotten:
                self._crew.tell("forget_adapter", self._forgotten.popleft())
