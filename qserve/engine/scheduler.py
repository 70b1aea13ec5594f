"""The scheduler: which tokens of which requests the next step computes. Knows no tensors.

A step is a list of chunks (request, start, count) under one token budget. There are no phases: a
chunk of a prompt has a large count, a decode has 1. Running requests come first, in order of
arrival, so that a decode never waits behind a prompt; then waiting ones are admitted. When pages
run out, the youngest running request gives its pages back, keeps its tokens, and is computed again
later.

Steps may be in flight: `schedule()` counts the tokens they will sample, `update()` takes them when
they reach the host.
"""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.engine.kv_pages import PagePool
from qserve.engine.request import Request, RequestEvent, Status, TokenLogprobs
from qserve.engine.waiting_queue import WaitingQueue


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


class Scheduler:
    """One budget, one queue, one pool of pages."""

    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Raises InputError where a step could not hold one token of every request."""
        if max_num_batched_tokens < max_num_seqs:
            raise InputError(
                "max_num_batched_tokens",
                f"expected at least max_num_seqs ({max_num_seqs}), found {max_num_batched_tokens}",
                "a running request must get a token in every step; lower --max-num-seqs",
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of arrival

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
        self.waiting.push(request)

    def schedule(self) -> StepPlan:
        """Plan the next step: mark its tokens as computed and own the pages they need."""
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        preempted: list[Request] = []
        admitted: list[Request] = []
        # Only the last running request can be inside its prompt: a request is admitted behind it
        # when the budget has reached its end. So those before it take one token each, and there
        # is budget for all.
        index = 0
        while index < len(self.running):
            request = self.running[index]
            count = min(request.num_uncomputed, budget)
            if count > 0 and self._make_room(request, count, preempted):
                chunks.append(self._take(request, count))
                budget -= count
            index += 1
        while budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.first()
            if request is None:
                break
            # The whole known length must fit, not only its first chunk, or two long prompts
            # would push each other out in turns. One that was just pushed out never fits: its
            # pages are taken.
            if not self.pool.can_grow(request.block_table, request.num_tokens):
                break
            self.waiting.pop()
            request.status = Status.RUNNING
            if not request.num_preemptions:
                admitted.append(request)
            self.running.append(request)
            self.pool.grow_(request.block_table, request.num_tokens)
            count = min(request.num_uncomputed, budget)
            chunks.append(self._take(request, count))
            budget -= count
        return StepPlan(chunks=tuple(chunks), preempted=tuple(preempted), admitted=tuple(admitted))

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

    def _take(self, request: Request, count: int) -> Chunk:
        start = request.num_computed
        num_sampled = int(start + count == request.num_tokens)
        request.num_computed += count
        request.num_pending += num_sampled
        return Chunk(request=request, start=start, count=count, num_sampled=num_sampled)

    def _make_room(self, request: Request, count: int, preempted: list[Request]) -> bool:
        """Own pages for `count` more positions, pushing out younger requests where needed.

        The victims come from the end of `running`, which this step has not reached yet; the last
        resort is `request` itself. Returns False where it had to go.
        """
        needed = request.num_computed + count
        while not self.pool.can_grow(request.block_table, needed):
            victim = self.running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        self.pool.grow_(request.block_table, needed)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it waits, first in line, and computes its tokens again."""
        self.pool.release_(request.block_table)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.push_front(request)
