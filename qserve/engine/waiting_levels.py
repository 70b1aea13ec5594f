"""WaitingLevels: the queues of all levels; who is in a lower one goes first. Knows no pages.

Each level is a WaitingQueue with its own turns. Only the lowest that is not empty is looked at: a
request of a higher level that would fit waits until those before it have been admitted.

Lower levels that keep coming would keep higher ones waiting for ever, so what waits ages: after
`max_passes` admissions that passed over higher levels, the oldest request of those joins the level
of the last admission, before all others that wait there, and stays in it to its end. It is one
request each time, whatever number of levels wait. One that has k older ones before it in the higher
levels joins after at most (k + 1) * max_passes admissions of lower ones.
"""

import math
from collections.abc import Iterator
from typing import Any

from qserve.engine.request import Request
from qserve.engine.waiting_queue import WaitingQueue


class WaitingLevels:
    """All requests that are neither running nor finished, by `request.level`."""

    def __init__(self, max_passes: float = math.inf) -> None:
        self._max_passes = max_passes
        self._num_passes = 0  # admissions over higher levels since the last request aged
        self._queues: dict[Any, WaitingQueue] = {}  # none is empty
        self._first = WaitingQueue()  # of the lowest level; an empty one where nobody waits

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for level in sorted(self._queues):
            yield from self._queues[level]

    @property
    def num_tokens(self) -> int:
        """That have to be computed first, prompts and outputs so far."""
        return sum(queue.num_tokens for queue in self._queues.values())

    @property
    def first_queue(self) -> WaitingQueue:
        """The queue of the lowest level, which says whom to admit; empty where nobody waits."""
        return self._first

    def push(self, request: Request) -> None:
        """Queue a new request."""
        self._queue(request).push(request)

    def push_front(self, request: Request) -> None:
        """Put back a request that lost its pages, before all others of its level."""
        self._queue(request).push_front(request)

    def admit(self, request: Request) -> None:
        """Take one that is a candidate of its level: it runs now."""
        level = request.level
        self._queues[level].admit(request)
        self._forget_empty(level)
        is_pass = any(other > level for other in self._queues)
        self._num_passes = self._num_passes + 1 if is_pass else 0
        if self._num_passes >= self._max_passes:
            self._num_passes = 0
            self._age(level)

    def remove(self, request: Request) -> None:
        """Take one out without its turn."""
        self._queues[request.level].remove(request)
        self._forget_empty(request.level)

    def check_integrity(self) -> None:
        """Assert that every queue is in order, none is empty, and nobody in it holds pages."""
        for level, queue in self._queues.items():
            queue.check_integrity()
            if not queue or any(request.level != level for request in queue):
                raise AssertionError(f"the queue of level {level!r} holds what it should not")
            if any(request.block_table for request in queue):
                raise AssertionError("a waiting request holds pages")
        if self._queues and self._first is not self._queues[min(self._queues)]:
            raise AssertionError("the first queue is not of the lowest level")

    def _age(self, level: Any) -> None:
        """Move the oldest request of all higher levels to the front of this one."""
        higher = (queue for other, queue in self._queues.items() if other > level)
        oldest = min(
            (request for queue in higher for request in queue),
            key=lambda request: request.num_steps_at_arrival,
        )
        self.remove(oldest)
        oldest.level = level
        self.push_front(oldest)

    def _queue(self, request: Request) -> WaitingQueue:
        queue = self._queues.get(request.level)
        if queue is None:
            queue = self._queues[request.level] = WaitingQueue()
            self._first = self._queues[min(self._queues)]
        return queue

    def _forget_empty(self, level: Any) -> None:
        # With it go its turns, as within a queue those of who has nothing that waits.
        if not self._queues[level]:
            del self._queues[level]
            self._first = self._queues[min(self._queues)] if self._queues else WaitingQueue()
