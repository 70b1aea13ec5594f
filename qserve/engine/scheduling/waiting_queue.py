"""WaitingQueue: requests that wait for admission, in order; WaitingLevels: one queue per priority.

Preempted requests come first. Then clients take turns, and the groups of a client take turns. A
group is all outputs of one API request; a flow is one group of one client. Within a group, and
among all requests if no clients or groups are named, the order is first come, first served.

A turn costs a constant plus the tokens of the request; the tokens of its prompt count twice if
their log probabilities are reported. The bounds are:

- Before a client's first request is admitted, every other waiting client gets at most one turn.
  Clients that keep waiting differ by at most the cost of one request. The same holds for the groups
  of a client.
- An endless stream of new clients could still take all turns. So after MAX_BYPASSES admissions
  that passed over the oldest request, the oldest request is next. The oldest is the request that
  has been the first of its group for the longest time. A request with k older ones ahead of it is
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
    """Start-time fair queueing (Goyal, Vin and Cheng 1996) over the names of waiting clients.

    The start of a name is the cost of its turns so far. The name with the smallest start is next;
    ties go to the name that joined first. A name that joins starts at the current turn of the
    others: it neither jumps ahead nor pays for its absence.
    """

    def __init__(self) -> None:
        self._starts: dict[str, tuple[int, int]] = {}  # name -> start, tie breaker
        self._heap: list[tuple[int, int, str]] = []  # the same entries, plus outdated ones
        self._numbers = count()
        self._now = 0  # the smallest start when a name was last served

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def __bool__(self) -> bool:
        return bool(self._starts)

    def join(self, name: str) -> None:
        """Add a name. Does nothing if it is already waiting."""
        if name not in self._starts:
            self._wait(name, self._now)

    def first(self) -> str:
        """Return the name whose turn it is."""
        while self._starts.get(self._heap[0][2]) != self._heap[0][:2]:
            heappop(self._heap)
        return self._heap[0][2]

    def in_order(self) -> Iterator[str]:
        """Yield all names in the order of their next turns. Sorts only after the first name."""
        first = self.first()
        yield first
        for name, _ in sorted(self._starts.items(), key=itemgetter(1)):
            if name != first:
                yield name

    def serve(self, name: str, cost: int) -> None:
        """Give a name, usually the first, its turn. It then waits for its next turn."""
        start, _ = self._starts[name]
        self._now = self._starts[self.first()][0]
        self._wait(name, start + cost)

    def leave(self, name: str) -> None:
        """Remove a name. If it joins again, at most the cost of its last turn is forgotten."""
        del self._starts[name]

    def _wait(self, name: str, start: int) -> None:
        self._starts[name] = start, next(self._numbers)
        heappush(self._heap, (*self._starts[name], name))
        # remove outdated entries, which might never be popped
        if len(self._heap) > 2 * len(self._starts) + 16:
            self._heap = [(*entry, name) for name, entry in self._starts.items()]
            heapify(self._heap)


MAX_BYPASSES = 8
# Cost of a turn in addition to the prompt, for the output, whose length is unknown. Without it,
# prompts of one token would be almost free, and their owner would get hundreds of slots for each
# slot of another client.
COST_OF_OUTPUT = 256


class WaitingQueue:
    """The waiting requests of one level, in order of admission."""

    def __init__(self, max_bypasses: int = MAX_BYPASSES) -> None:
        self._max_bypasses = max_bypasses
        self._num_tokens_of: dict[Request, int] = {}  # waiting request -> its tokens
        self.num_tokens = 0  # sum over all waiting requests, prompts and outputs
        self._preempted: deque[Request] = deque()
        self._flows: dict[Flow, deque[Request]] = {}  # without empty queues
        self._clients = FairOrder()
        self._groups: dict[str, FairOrder] = {}  # waiting client -> order of its groups
        # The first request of each flow, in the order in which they became first. May include
        # requests that have left.
        self._heads: deque[Request] = deque()
        self._num_bypasses = 0  # number of admissions since an oldest head was admitted

    def __len__(self) -> int:
        return len(self._num_tokens_of)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the preempted requests, then over the others group by group."""
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
        """Return the next request to admit, or None."""
        return self._preempted[0] if self._preempted else self.first_in_turn()

    @property
    def first_preempted(self) -> Request | None:
        return self._preempted[0] if self._preempted else None

    def first_in_turn(self) -> Request | None:
        """Return the next request that has not run yet, or None."""
        return next(self._heads_in_turn(), None)

    def candidates(self) -> Iterator[Request]:
        """Yield requests to admit, in order of preference; only one if it must be first."""
        return islice(self._preempted, 1) if self._preempted else self._heads_in_turn()

    @property
    def must_take_first(self) -> bool:
        """True if the first request was preempted or passed over too often, so it must be next."""
        return bool(self._preempted) or self._num_bypasses >= self._max_bypasses

    def first_shorter(self, num_tokens: int, other_than: Collection[Flow]) -> Request | None:
        """Return a request with fewer than `num_tokens` tokens from a flow not in `other_than`.

        Returns None if there is none, or if such a request must not be admitted now: preempted
        requests are never passed over, and the oldest request only MAX_BYPASSES times.
        """
        if self._preempted:
            return None
        for head in self._heads_in_turn():
            if head.num_tokens < num_tokens and head.flow not in other_than:
                return head
        return None

    def passed_over(self, other_than: Collection[Flow]) -> Request | None:
        """Return the oldest request if it has been passed over too often, else None."""
        if self._preempted or self._num_bypasses < self._max_bypasses:
            return None
        return next((r for r in self._heads_in_turn() if r.flow not in other_than), None)

    def admit(self, request: Request) -> None:
        """Remove a request that is admitted: the first of its flow, or the first preempted one."""
        if self._preempted and request is self._preempted[0]:
            self._preempted.popleft()
            self._uncount(request)
            return
        assert self._is_head(request), "an older request of its group is still waiting"
        # The log probabilities of a row cost about as much as its token (docs-5m on a CPU: 0.6).
        cost = request.num_tokens + request.num_logprob_rows + COST_OF_OUTPUT
        self._clients.serve(request.client, cost)
        self._groups[request.client].serve(request.group, cost)
        is_oldest = request is self._oldest_head()
        self._num_bypasses = 0 if is_oldest else self._num_bypasses + 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request before its turn."""
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
        """Yield the first request of each flow; only the oldest if it must not be passed over."""
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
        if len(self._heads) > 2 * len(self._flows) + 16:  # most of these requests have left
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
        # Not request.num_tokens: in-flight tokens may have been dropped since.
        self.num_tokens -= self._num_tokens_of.pop(request)


class WaitingLevels:
    """All waiting requests: one WaitingQueue per `request.level`.

    Only the lowest non-empty level is considered: a request of a higher level waits until all
    requests of lower levels have been admitted, even if it would fit.

    A steady stream of lower levels would starve higher levels, so waiting requests age. After
    `max_passes` admissions that passed over higher levels, the oldest request of the higher levels
    joins the level of the last admission, ahead of all others there. It stays in this level until
    it finishes. Only one request ages at a time. A request with k older ones ahead of it in the
    higher levels joins after at most (k + 1) * max_passes admissions from lower levels.
    """

    def __init__(self, max_passes: float = math.inf) -> None:
        self._max_passes = max_passes
        self._num_passes = 0  # admissions that passed over higher levels since a request aged
        self._queues: dict[Any, WaitingQueue] = {}  # without empty queues
        self._first = WaitingQueue()  # queue of the lowest level; empty if no request waits

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for level in sorted(self._queues):
            yield from self._queues[level]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all waiting requests: prompts and outputs so far."""
        return sum(queue.num_tokens for queue in self._queues.values())

    @property
    def first_queue(self) -> WaitingQueue:
        """The queue of the lowest level, from which requests are admitted. May be empty."""
        return self._first

    def push(self, request: Request) -> None:
        """Queue a new request."""
        self._queue(request).push(request)

    def push_front(self, request: Request) -> None:
        """Put back a preempted request, ahead of all others of its level."""
        self._queue(request).push_front(request)

    def admit(self, request: Request) -> None:
        """Remove a request that is admitted. It must be a candidate of its level."""
        level = request.level
        self._queues[level].admit(request)
        self._forget_empty(level)
        is_pass = any(other > level for other in self._queues)
        self._num_passes = self._num_passes + 1 if is_pass else 0
        if self._num_passes >= self._max_passes:
            self._num_passes = 0
            self._age(level)

    def remove(self, request: Request) -> None:
        """Remove a request before its turn."""
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
        """Move the oldest request of all higher levels to the front of `level`."""
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
        # An empty queue is dropped together with its turns, as WaitingQueue drops the turns of a
        # group that no longer waits.
        if not self._queues[level]:
            del self._queues[level]
            self._first = self._queues[min(self._queues)] if self._queues else WaitingQueue()
