"""The scheduler: which tokens of which requests the next step computes. Knows no tensors.

A step is a list of chunks (request, start, count) under one token budget. There are no phases: a
chunk of a prompt has a large count, a decode has 1. Decodes come first, so that none waits behind
a prompt; then prompts that were begun, oldest first; then waiting requests are admitted. A prompt
that would use up the budget leaves up to half of it to shorter ones. When pages run out, the
youngest running request gives its pages back, keeps its tokens, and is computed again later. Whose
turn it is stands in waiting_queue.py. One who has nothing running, and waits because others have
all places or pages, gets some of theirs after PATIENCE steps.

Steps may be in flight: `schedule()` counts the tokens they will sample, `update()` takes them when
they reach the host.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import attrgetter

from formats.errors import InputError
from qserve.engine.kv_pages import NULL_PAGE, PagePool
from qserve.engine.request import Request, RequestEvent, Status, TokenLogprobs
from qserve.engine.waiting_queue import MAX_BYPASSES, WaitingQueue

# Steps that a request waits before others have to give way. Each time costs computing a request
# again, which is then little beside the steps between.
PATIENCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The slice of one request in one step."""

    request: Request
    start: int  # position of the first token
    count: int
    num_sampled: int = 0  # of its last rows, each of which yields a new token

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. Empty when nothing can run."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()  # gave their pages back to make this step possible
    admitted: tuple[Request, ...] = ()  # left the queue for the first time

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True, kw_only=True)
class _Step:
    """A plan while it is made."""

    budget: int  # tokens it may still compute
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)


class Scheduler:
    """One budget, one queue, one pool of pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
    ) -> None:
        """Raises InputError where a step could not hold one token of every request.

        `window`: keys that a query sees, itself included, in the layer where it sees most.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise InputError(
                "max_num_batched_tokens",
                f"expected at least max_num_seqs ({max_num_seqs}), found {max_num_batched_tokens}",
                "a running request must get a token in every step; lower --max-num-seqs",
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # the last gives way first
        self._num_steps = 0

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InputError where it could never finish, however long it waits."""
        longest = request.num_prompt_tokens + request.max_tokens
        # The last sampled token is never fed back, so its keys need no place.
        if self.pool.pages_for(longest - 1) > self.pool.num_pages:
            raise InputError(
                f"request {request.request_id}",
                f"needs {self.pool.pages_for(longest - 1)} KV pages for {longest} tokens,"
                f" and there are {self.pool.num_pages}",
                "shorten it, or give the server more memory for KV pages",
            )
        request.num_steps_at_arrival = self._num_steps
        self.waiting.push(request)

    def schedule(self) -> StepPlan:
        """Plan the next step: mark its tokens as computed and own the pages they need."""
        self._num_steps += 1
        step = _Step(budget=self.max_num_batched_tokens)
        self._make_place(step)
        self._plan_decodes(step)
        self._plan_prompts(step)
        return StepPlan(
            chunks=tuple(step.chunks),
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
        )

    def update(
        self,
        plan: StepPlan,
        sampled: list[int | str],
        logprobs: list[TokenLogprobs | None] | None = None,
    ) -> list[RequestEvent]:
        """Take the tokens a step sampled, one for each of its sampled rows, in order.

        A string in place of a token is the reason why that row failed: its request ends with it.
        `logprobs`, where any request asked for them, are as many.
        """
        events = []
        any_failed = any(isinstance(token, str) for token in sampled)
        row = 0
        for chunk in plan.chunks:
            request, first, row = chunk.request, row, row + chunk.num_sampled
            # A finished one was aborted, or ended by an earlier step while this was in flight.
            if first == row or request.status is Status.FINISHED:
                continue
            tokens = sampled[first:row]
            failures = [token for token in tokens if isinstance(token, str)] if any_failed else ()
            if failures:
                event = RequestEvent(
                    request_id=request.request_id,
                    token_ids=(),
                    finish_reason="error",
                    error=failures[0],
                )
            else:
                event = request.extend(tokens, logprobs[first:row] if logprobs else ())
            if event.finish_reason is not None:
                self.finish(request)
            events.append(event)
        assert row == len(sampled), "the samples are not those of the plan"
        return events

    def finish(self, request: Request) -> None:
        """Drop a request, running or waiting, and free its pages.

        A step in flight may still write to them. The next owner's writes come after it on the
        same device queue, so nothing that is read is overwritten.
        """
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        self.pool.release_(request.block_table)

    def check_integrity(self) -> None:
        """Assert that pages and states agree."""
        self.pool.check_integrity([request.block_table for request in self.running])
        if any(request.block_table for request in self.waiting):
            raise AssertionError("a waiting request holds pages")
        self.waiting.check_integrity()

    def _make_place(self, step: "_Step") -> None:
        """Preempt requests of who has most, for one who has nothing and whose turn it has been.

        It waits PATIENCE steps before. Each request gives way MAX_BYPASSES times at most.
        """
        request = self.waiting.first_in_turn()
        if request is None or self._num_steps - request.num_steps_at_arrival <= PATIENCE:
            return
        ahead = self.waiting.first_preempted
        if ahead is None:
            may_go = not self._has_place(request)  # else it is admitted without this
        else:
            may_go = ahead.num_bypasses < MAX_BYPASSES and ahead.flow != request.flow
        if not may_go:
            return
        victims = self._who_gives_way(request)
        if victims is None:
            return
        for victim in victims:
            self.running.remove(victim)
            self._preempt(victim, step)
        for each in {*victims, *([] if ahead is None else [ahead])}:
            each.num_bypasses += 1
        # Behind the oldest, which then always comes to its end. As the youngest it would be the
        # first to give way when pages run out.
        self._admit(request, step, seniority=1)

    def _who_gives_way(self, request: Request) -> list[Request] | None:
        """The youngest of the client, or else of the group, that runs most, but not its oldest.

        As many as make place for `request`; None where it has its share, or all are not enough.
        """
        for owner_of in (attrgetter("client"), attrgetter("flow")):
            counts = Counter(owner_of(each) for each in self.running)
            if not counts or counts[owner_of(request)]:
                continue
            if self._has_place(request):
                return []
            owner, _ = counts.most_common(1)[0]
            owned = [each for each in self.running if owner_of(each) == owner]
            victims, num_free = [], self.pool.num_free
            for victim in reversed(owned[1:]):
                if victim.num_bypasses >= MAX_BYPASSES:
                    continue
                victims.append(victim)
                num_free += sum(page != NULL_PAGE for page in victim.block_table)
                if num_free >= self.pool.pages_for(request.num_tokens):
                    return victims
        return None

    def _plan_decodes(self, step: "_Step") -> None:
        # A step has a token for each running request, so there is budget for all.
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if request.num_uncomputed == 1 and self._make_room(request, step):
                self._take(request, 1, step)
            index += 1

    def _plan_prompts(self, step: "_Step") -> None:
        begun = [each for each in self.running if each.num_uncomputed > 1]
        begun = deque(sorted(begun, key=attrgetter("num_steps_at_arrival")))
        while step.budget > 0:
            request = begun.popleft() if begun else self._admit_first(step)
            if request is None:
                break
            if request.num_uncomputed > step.budget:
                self._plan_shorter(request, begun, step)
            self._take(request, min(request.num_uncomputed, step.budget), step)

    def _plan_shorter(self, longest: Request, begun: Collection[Request], step: "_Step") -> None:
        """Give half of the budget to what is shorter than the oldest prompt that is not done.

        The oldest gets the other half at least, so it is not kept from its end.
        """
        begun = sorted(begun, key=attrgetter("num_uncomputed"))
        share = step.budget // 2
        flows = {longest.flow, *(each.flow for each in begun)}
        shortest = (begun or [longest])[0].num_uncomputed
        while share > 0:
            request = self.waiting.first_shorter(shortest, other_than=flows)
            if request is None and not begun:
                request = self.waiting.passed_over(other_than=flows)
            if request is None or not self._has_place(request):
                break
            self._admit(request, step, len(self.running))
            share -= self._take(request, min(request.num_uncomputed, share), step)
        for request in begun:
            if share > 0:
                share -= self._take(request, min(request.num_uncomputed, share), step)

    def _admit_first(self, step: "_Step") -> Request | None:
        """The next request that waits, running now, or None where there is no place for it."""
        request = self.waiting.first()
        if request is None or not self._has_place(request):
            return None
        self._admit(request, step, len(self.running))
        return request

    def _has_place(self, request: Request) -> bool:
        # The whole known length must fit, not only its first chunk, or two long prompts would push
        # each other out in turns. One that was pushed out just now never fits: its pages are taken.
        return len(self.running) < self.max_num_seqs and self.pool.can_grow(
            request.block_table, request.num_tokens
        )

    def _admit(self, request: Request, step: "_Step", seniority: int) -> None:
        assert not request.num_pending, "pushed out and back in one step, its token in flight"
        self.waiting.admit(request)
        request.status = Status.RUNNING
        if not request.num_preemptions:
            step.admitted.append(request)
        self.running.insert(seniority, request)
        self.pool.grow_(request.block_table, request.num_tokens)

    def _take(self, request: Request, count: int, step: "_Step") -> int:
        """Add the next `count` tokens of a request to the step. Returns `count`."""
        start = request.num_computed
        if self.window is not None:
            # A step in flight may still read them: who gets them writes after it.
            self.pool.give_back_(request.block_table, max(0, start - self.window + 1))
        num_sampled = int(start + count == request.num_tokens)
        request.num_computed += count
        request.num_pending += num_sampled
        chunk = Chunk(request=request, start=start, count=count, num_sampled=num_sampled)
        step.chunks.append(chunk)
        step.budget -= count
        return count

    def _make_room(self, request: Request, step: "_Step") -> bool:
        """Own pages for one more position, pushing out younger requests where needed.

        The victims come from the end of `running`, which this step has not reached yet; the last
        resort is `request` itself. Returns False where it had to go.
        """
        needed = request.num_computed + 1
        while not self.pool.can_grow(request.block_table, needed):
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is request:
                return False
        self.pool.grow_(request.block_table, needed)
        return True

    def _preempt(self, request: Request, step: "_Step") -> None:
        """Take a request's pages; it waits, first in line, and computes its tokens again."""
        self.pool.release_(request.block_table)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.push_front(request)
        step.preempted.append(request)
