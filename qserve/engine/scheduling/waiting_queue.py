"""WaitingQueue: requests that wait for admission, in order; WaitingLevels: one queue per priority.

Preempted requests come first. Then clients take turns, and within a client its groups: a group is
one API request, however many outputs it asks for. Within a group, and among all requests if no
clients or groups are named, the order is first come, first served.

A turn costs a constant plus the tokens of the request; the tokens of its prompt count twice if
their log probabilities are reported. The bounds are:

- Before a client's first request is admitted, every other waiting client gets one turn at most.
  Clients that keep waiting differ by one request's cost at most. The same holds for the groups of
  a client.
- An endless stream of new clients could still take all turns. So after MAX_BYPASSES admissions
  that passed over the oldest request, it is next, whoever's turn it is. The oldest is the request
  that has been the first of its group for longest. One that has k older ones ahead of it is
  admitted after at most (k + 1) * (MAX_BYPASSES + 1) - 1 others.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import count, islice
from operator import itemgetter
from typing import Any

from qserve.engine.request import Flow, Request


class FairOrder:
    """Start-time fair queueing (Goyal, Vin and Cheng 1996) over the waiting names.

    A name's start is the cost of its turns so far. The smallest start is next; ties go to the name
    that joined first. A name that joins starts where the others are: it neither jumps ahead nor
    pays for its absence.
    """

    def __init__(self) -> None:
        self._starts: dict[str, tuple[int, int]] = {}  # name -> start, tie breaker
        self._heap: list[tuple[int, int, str]] = []  # the same entries, and outdated ones
        self._numbers = count()
        self._now = 0  # the smallest start when a name was last served

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def __bool__(self) -> bool:
        return bool(self._starts)

    def join(self, name: str) -> None:
        """Add a name, unless it waits already."""
        if name not in self._starts:
            self._wait(name, self._now)

    def first(self) -> str:
        """The name whose turn it is."""
        while self._starts.get(self._heap[0][2]) != self._heap[0][:2]:
            heappop(self._heap)
        return self._heap[0][2]

    def in_order(self) -> Iterator[str]:
        """All names, as if each left after its turn. Sorts only after the first one."""
        first = self.first()
        yield first
        for name, _ in sorted(self._starts.items(), key=itemgetter(1)):
            if name != first:
                yield name

    def serve(self, name: str, cost: int) -> None:
        """Give a name, usually the first, its turn; it then waits for the next one."""
        start, _ = self._starts[name]
        self._now = self._starts[self.first()][0]
        self._wait(name, start + cost)

    def leave(self, name: str) -> None:
        """Remove a name. At most the cost of its last turn is forgotten."""
        del self._starts[name]

    def _wait(self, name: str, start: int) -> None:
        self._starts[name] = start, next(self._numbers)
        heappush(self._heap, (*self._starts[name], name))
        # outdated entries that would never be popped
        if len(self._heap) > 2 * len(self._starts) + 16:
            self._heap = [(*entry, name) for name, entry in self._starts.items()]
            heapify(self._heap)


MAX_BYPASSES = 8
# Cost of a turn in addition to the prompt, for the output of unknown length. Without it, prompts of
# one token would be free, and their owner would get hundreds of slots for one of another's.
COST_OF_OUTPUT = 256


class WaitingQueue:
    """All requests that are neither running nor finished."""

    def __init__(self, max_bypasses: int = MAX_BYPASSES) -> None:
        self._max_bypasses = max_bypasses
        self._num_tokens_of: dict[Request, int] = {}  # all waiting requests
        self.num_tokens = 0  # the sum, prompts and outputs
        self._preempted: deque[Request] = deque()
        self._flows: dict[Flow, deque[Request]] = {}  # none is empty
        self._clients = FairOrder()
        self._groups: dict[str, FairOrder] = {}  # of each waiting client
        # The first request of each flow, in the order in which they became first; may hold requests
        # that left.
        self._heads: deque[Request] = deque()
        self._num_bypasses = 0  # admissions since the oldest of them was last admitted

    def __len__(self) -> int:
        return len(self._num_tokens_of)

    def __iter__(self) -> Iterator[Request]:
        """Preempted requests, then group by group."""
        yield from self._preempted
        for waiting in self._flows.values():
            yield from waiting

    def push(self, request: Request) -> None:
        """Queue a new request."""
        self._count(request)
        waiting = self._flows.setdefault(request.flow, deque())
        waiting.append(request)
        if len(waiting) == 1:
            self._clients.join(request.client)
            self._groups.setdefault(request.client, FairOrder()).join(request.group)
            self._add_head(request)

    def push_front(self, request: Request) -> None:
        """Put back a preempted request, ahead of all others."""
        self._count(request)
        self._preempted.appendleft(request)

    def first(self) -> Request | None:
        """The next request to admit, or None."""
        return self._preempted[0] if self._preempted else self.first_in_turn()

    @property
    def first_preempted(self) -> Request | None:
        return self._preempted[0] if self._preempted else None

    def first_in_turn(self) -> Request | None:
        """The next request that has not run yet, or None."""
        return next(self._heads_in_turn(), None)

    def candidates(self) -> Iterator[Request]:
        """Requests to admit, in order of preference; only one if it must be first."""
        return islice(self._preempted, 1) if self._preempted else self._heads_in_turn()

    @property
    def must_take_first(self) -> bool:
        """True if the first must not be passed over: it was preempted, or passed over too often."""
        return bool(self._preempted) or self._num_bypasses >= self._max_bypasses

    def first_shorter(self, num_tokens: int, other_than: Collection[Flow]) -> Request | None:
        """A request of fewer tokens that may pass longer ones, from none of `other_than`; or None.

        Preempted requests are not passed, nor is the oldest once it has been passed too often.
        """
        if self._preempted:
            return None
        for head in self._heads_in_turn():
            if head.num_tokens < num_tokens and head.flow not in other_than:
                return head
        return None

    def passed_over(self, other_than: Collection[Flow]) -> Request | None:
        """The oldest request if it has been passed over as often as allowed, or None."""
        if self._preempted or self._num_bypasses < self._max_bypasses:
            return None
        return next((r for r in self._heads_in_turn() if r.flow not in other_than), None)

    def admit(self, request: Request) -> None:
        """Remove the first request of its flow, or the first preempted one: it runs now."""
        if self._preempted and request is self._preempted[0]:
            self._preempted.popleft()
            self._uncount(request)
            return
        assert self._is_head(request), "an older request of its group is still waiting"
        # Log probabilities of a row cost about as much as its token (docs-5m, CPU: 0.6 of it).
        cost = request.num_tokens + request.num_logprob_rows + COST_OF_OUTPUT
        self._clients.serve(request.client, cost)
        self._groups[request.client].serve(request.group, cost)
        is_oldest = request is self._oldest_head()
        self._num_bypasses = 0 if is_oldest else self._num_bypasses + 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request out of turn."""
        self._uncount(request)
        waiting = self._flows.get(request.flow, ())
        if request not in waiting:
            self._preempted.remove(request)
            return
        was_head = waiting[0] is request
        waiting.remove(request)
        if not waiting:
            self._forget(request.flow)
        elif was_head:
            self._add_head(waiting[0])

    def check_integrity(self) -> None:
        """Assert that counts and turns match the waiting requests."""
        if sorted(map(id, self)) != sorted(map(id, self._num_tokens_of)):
            raise AssertionError("the waiting requests differ from the queued ones")
        if sum(self._num_tokens_of.values()) != self.num_tokens:
            raise AssertionError(f"num_tokens ({self.num_tokens}) is not the sum of the requests")
        for client, group in self._flows:
            if client not in self._clients or group not in self._groups[client]:
                raise AssertionError(f"group {group!r} of client {client!r} has no turn")
        if self._groups.keys() != {client for client, _ in self._flows}:
            raise AssertionError("a client without waiting requests has a turn")

    def _heads_in_turn(self) -> Iterator[Request]:
        """The first request of each flow; only the oldest if it may not be passed over again."""
        if not self._flows:
            return
        if self._num_bypasses >= self._max_bypasses:
            yield self._oldest_head()
            return
        for client in self._clients.in_order():
            for group in self._groups[client].in_order():
                yield self._flows[client, group][0]

    def _forget(self, flow: Flow) -> None:
        client, group = flow
        del self._flows[flow]
        self._groups[client].leave(group)
        if not self._groups[client]:
            del self._groups[client]
            self._clients.leave(client)

    def _add_head(self, request: Request) -> None:
        self._heads.append(request)
        if len(self._heads) > 2 * len(self._flows) + 16:  # mostly of requests that left
            self._heads = deque(head for head in self._heads if self._is_head(head))

    def _is_head(self, request: Request) -> bool:
        waiting = self._flows.get(request.flow)
        return waiting is not None and waiting[0] is request

    def _oldest_head(self) -> Request:
        while not self._is_head(self._heads[0]):
            self._heads.popleft()
        return self._heads[0]

    def _count(self, request: Request) -> None:
        self._num_tokens_of[request] = request.num_tokens
        self.num_tokens += request.num_tokens

    def _uncount(self, request: Request) -> None:
        # The number of its in-flight tokens may have shrunk since.
        self.num_tokens -= self._num_tokens_of.pop(request)


class WaitingLevels:
    """All requests that are neither running nor finished: a WaitingQueue per `request.level`.

    Only the lowest level that is not empty is considered: a request of a higher level that would
    fit waits until those before it have been admitted.

    A steady stream of lower levels would starve higher ones, so waiting requests age. After
    `max_passes` admissions that passed over higher levels, their oldest request joins the level of
    the last admission, ahead of all others there, and stays in it until it finishes. One request
    ages at a time, however many levels wait. A request with k older ones ahead of it in the higher
    levels joins after at most (k + 1) * max_passes admissions of lower ones.
    """

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
