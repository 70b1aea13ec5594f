"""Deadlines of requests."""

from heapq import heapify, heappop, heappush
from itertools import count

from qserve.engine.request import Request, Status


class Deadlines:
    """Requests ordered by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()  # tie breaker, so that requests are never compared
        self._most = 16  # entries before those of finished requests are removed

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, timeout: float) -> None:
        """Add a request. `timeout`: seconds from its arrival."""
        heappush(self._heap, (request.arrived + timeout, next(self._numbers), request))
        if len(self._heap) > self._most:
            self._heap = [e for e in self._heap if e[2].status is not Status.FINISHED]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + 16

    def missed(self, now: float) -> list[Request]:
        """Unfinished requests whose deadline has passed; each is returned once."""
        missed = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request.status is not Status.FINISHED:
                missed.append(request)
        return missed
