"""FairOrder: who is next among names that want shares of the same thing. Knows no requests.

Start-time fair queueing (Goyal, Vin and Cheng 1996): each name that waits has a start, the cost of
its turns so far, and the least start is next. A name that comes begins where the others are, so it
neither jumps far ahead nor pays for having been away. Among equals the first to come is first.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from operator import itemgetter


class FairOrder:
    """The names that wait."""

    def __init__(self) -> None:
        self._starts: dict[str, tuple[int, int]] = {}  # name -> start, tie breaker
        self._heap: list[tuple[int, int, str]] = []  # the same, and what has become invalid
        self._numbers = count()
        self._now = 0  # the least start when one was last served

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def __bool__(self) -> bool:
        return bool(self._starts)

    def join(self, name: str) -> None:
        """Wait, unless it does already."""
        if name not in self._starts:
            self._wait(name, self._now)

    def first(self) -> str:
        """Whose turn it is."""
        while self._starts.get(self._heap[0][2]) != self._heap[0][:2]:
            heappop(self._heap)
        return self._heap[0][2]

    def in_order(self) -> Iterator[str]:
        """All, as if each left after its turn. Sorts only for who asks beyond the first."""
        first = self.first()
        yield first
        for name, _ in sorted(self._starts.items(), key=itemgetter(1)):
            if name != first:
                yield name

    def serve(self, name: str, cost: int) -> None:
        """A name, mostly the first, takes a turn and waits for the next."""
        start, _ = self._starts[name]
        self._now = self._starts[self.first()][0]
        self._wait(name, start + cost)

    def leave(self, name: str) -> None:
        """Wait no longer. At most the cost of the last turn is forgotten."""
        del self._starts[name]

    def _wait(self, name: str, start: int) -> None:
        self._starts[name] = start, next(self._numbers)
        heappush(self._heap, (*self._starts[name], name))
        if len(self._heap) > 2 * len(self._starts) + 16:  # what left, and would never come up
            self._heap = [(*entry, name) for name, entry in self._starts.items()]
            heapify(self._heap)
