"""The requests that wait for a place in the step, in the order of admission. Knows no pages.

Those that lost their pages come first. Then clients take turns, and within a client its groups:
a group is one API request, whatever number of outputs it asks for. Within a group the first come
is the first served, and so it is among all where nobody names clients or groups.

Bounds, where each turn costs the tokens of the request and a constant:

- Before a client's first request is admitted, every other client that waits gets one turn at most;
  among clients that keep waiting, what they got differs by one request's cost at most. The same
  holds for the groups of a client.
- New clients without end could still take all turns. So after MAX_BYPASSES admissions that passed
  over the oldest it is next, whoever's turn it is. The oldest is the request that has been its
  group's first for longest; one that has k older ones before it is admitted after at most
  (k + 1) * (MAX_BYPASSES + 1) - 1 others.
"""

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice

from qserve.engine.fair_order import FairOrder
from qserve.engine.request import Flow, Request

MAX_BYPASSES = 8
# What a turn costs beside the prompt. The output is to come, its length unknown: prompts of a token
# are not free, or their owner would get hundreds of places for one of another's.
COST_OF_OUTPUT = 256


class WaitingQueue:
    """All requests that are neither running nor finished."""

    def __init__(self, max_bypasses: int = MAX_BYPASSES) -> None:
        self._max_bypasses = max_bypasses
        self._num_tokens_of: dict[Request, int] = {}  # all that wait
        self.num_tokens = 0  # their sum, prompt and output
        self._preempted: deque[Request] = deque()
        self._flows: dict[Flow, deque[Request]] = {}  # none is empty
        self._clients = FairOrder()
        self._groups: dict[str, FairOrder] = {}  # of each client that waits
        # The first request of each flow, in the order in which they became it, and some that left.
        self._heads: deque[Request] = deque()
        self._num_bypasses = 0  # admissions since the oldest of them was last admitted

    def __len__(self) -> int:
        return len(self._num_tokens_of)

    def __iter__(self) -> Iterator[Request]:
        """Those that lost their pages, then group by group."""
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
        """Put back a request that lost its pages, before all others."""
        self._count(request)
        self._preempted.appendleft(request)

    def first(self) -> Request | None:
        """The next to be admitted, or None."""
        return self._preempted[0] if self._preempted else self.first_in_turn()

    @property
    def first_preempted(self) -> Request | None:
        return self._preempted[0] if self._preempted else None

    def first_in_turn(self) -> Request | None:
        """The next of those that never ran, or None."""
        return next(self._heads_in_turn(), None)

    def candidates(self) -> Iterator[Request]:
        """Whom to admit, the first choice first; one alone where it has to be that one."""
        return islice(self._preempted, 1) if self._preempted else self._heads_in_turn()

    @property
    def must_take_first(self) -> bool:
        """Whether the first may not be passed over: it lost its pages, or was so too often."""
        return bool(self._preempted) or self._num_bypasses >= self._max_bypasses

    def first_shorter(self, num_tokens: int, other_than: Collection[Flow]) -> Request | None:
        """One of fewer tokens that may pass longer ones, from none of some flows; or None.

        Those that lost their pages are not passed, nor the oldest once it may not be any more.
        """
        if self._preempted:
            return None
        for head in self._heads_in_turn():
            if head.num_tokens < num_tokens and head.flow not in other_than:
                return head
        return None

    def passed_over(self, other_than: Collection[Flow]) -> Request | None:
        """The oldest, where it has been passed over as often as it may be, or None."""
        if self._preempted or self._num_bypasses < self._max_bypasses:
            return None
        return next((r for r in self._heads_in_turn() if r.flow not in other_than), None)

    def admit(self, request: Request) -> None:
        """Take the first of its flow, or of those that lost their pages: it runs now."""
        if self._preempted and request is self._preempted[0]:
            self._preempted.popleft()
            self._uncount(request)
            return
        assert self._is_head(request), "admitted before an older one of its group"
        cost = request.num_tokens + COST_OF_OUTPUT
        self._clients.serve(request.client, cost)
        self._groups[request.client].serve(request.group, cost)
        is_oldest = request is self._oldest_head()
        self._num_bypasses = 0 if is_oldest else self._num_bypasses + 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take one out without its turn."""
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
        """Assert that counts and turns are of what waits."""
        if sorted(map(id, self)) != sorted(map(id, self._num_tokens_of)):
            raise AssertionError("what waits is not what was queued")
        if sum(self._num_tokens_of.values()) != self.num_tokens:
            raise AssertionError(f"{self.num_tokens} waiting tokens are not what waits")
        for client, group in self._flows:
            if client not in self._clients or group not in self._groups[client]:
                raise AssertionError(f"group {group!r} of client {client!r} has no turn")
        if self._groups.keys() != {client for client, _ in self._flows}:
            raise AssertionError("a client without requests is remembered")

    def _heads_in_turn(self) -> Iterator[Request]:
        """The first of each flow; only the oldest where it may not be passed over again."""
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
        # Its tokens in flight may have turned out to be fewer since.
        self.num_tokens -= self._num_tokens_of.pop(request)
