"""WaitingLevels: one waiting queue per priority level; lower levels go first.

Each level is a WaitingQueue with its own turns. Only the lowest non-empty level is considered: a
request of a higher level that would fit waits until those before it have been admitted.

A steady stream of lower levels would starve higher ones, so waiting requests age. After
`max_passes` admissions that passed over higher levels, their oldest request joins the level of the
last admission, ahead of all others there, and stays in it until it finishes. One request ages at a
time, however many levels wait. A request with k older ones ahead of it in the higher levels joins
after at most (k + 1) * max_passes admissions of lower ones.
"""

import math
from collections.abc import Iterator
from typing import Any

from qserve.engine.request import Request
from qserve.engine.scheduling.waiting_queue import WaitingQueue


class WaitingLevels:
    """All requests that are neither running nor finished, by `request.level`."""

    def __init__(self, max_passes: float = math.inf) -> None:
        self._max_passes = max_passes
        self._num_passes = 0  # admissions over higher levels since the last request aged
        self._queues: dict[Any, WaitingQueue] = {}  # none is empty
        self._first = WaitingQueue()  # of the lowest level; empty if no request waits

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for level in sorted(self._queues):
            yield from self._queues[level]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute for all waiting requests: prompts and outputs so far."""
        return sum(queue.num_tokens for queue in self._queues.values())

    @property
    def first_queue(self) -> WaitingQueue:
        """The queue of the lowest level, which decides whom to admit; empty if no request waits."""
        return self._first

    def push(self, request: Request) -> None:
        """Queue a new request."""
        self._queue(request).push(request)

    def push_front(self, request: Request) -> None:
        """Put back a preempted request, ahead of all others of its level."""
        self._queue(request).push_front(request)

    def admit(self, request: Request) -> None:
        """Remove a candidate of its level: it runs now."""
        level = request.level
        self._queues[level].admit(request)
        self._forget_empty(level)
        is_pass = any(other > level for other in self._queues)
        self._num_passes = self._num_passes + 1 if is_pass else 0
        if self._num_passes >= self._max_passes:
            self._num_passes = 0
            self._age(level)

    def remove(self, request: Request) -> None:
        """Remove a request out of turn."""
        self._queues[request.level].remove(request)
        self._forget_empty(request.level)

    def check_integrity(self) -> None:
        """Assert that each queue is consistent and non-empty, and holds no request with pages."""
        for level, queue in self._queues.items():
            queue.check_integrity()
            if not queue or any(request.level != level for request in queue):
                raise AssertionError(f"the queue of level {level!r} is empty or holds other levels")
            if any(request.block_table for request in queue):
                raise AssertionError("a waiting request holds pages")
        if self._queues and self._first is not self._queues[min(self._queues)]:
            raise AssertionError("the first queue is not that of the lowest level")

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
        # The turns of the level are dropped with its queue, as WaitingQueue drops those of a group
        # that no longer waits.
        if not self._queues[level]:
            del self._queues[level]
            self._first = self._queues[min(self._queues)] if self._queues else WaitingQueue()
