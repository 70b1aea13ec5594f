"""The scheduler: which tokens of which requests the next step computes. Knows no tensors.

A step is a list of chunks (request, start, count) under one token budget. There are no phases
unless the policy (policies.py) makes some: a chunk of a prompt has a large count, a decode has 1.
Decodes come first, so that none waits behind a prompt; then prompts (prompt_chunks.py); then
waiting requests are admitted (admission.py), as far as there are places (places.py).

A request that is admitted takes over the pages that its tokens have already (prefix_cache.py).

Of steps in flight `schedule()` counts the tokens; `update()` takes them when they reach the host.
"""

from formats.errors import InputError
from qserve.engine.admission import Admission
from qserve.engine.kv_pages import NULL_PAGE, PagePool
from qserve.engine.places import Places
from qserve.engine.policies import MAX_PROMPT_STEPS, Counts, Phase, Policy
from qserve.engine.prefix_cache import PrefixCache
from qserve.engine.prompt_chunks import PromptChunks
from qserve.engine.request import Request, RequestEvent, Status, TokenLogprobs
from qserve.engine.state_slots import StatePool
from qserve.engine.state_snapshots import StateSnapshots
from qserve.engine.step_pace import StepPace
from qserve.engine.step_plan import Chunk, OpenStep, StepPlan
from qserve.engine.waiting_levels import WaitingLevels
from qserve.speculation.speculation import Speculation


class Scheduler:
    """One budget, one queue, one pool of pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        policy: Policy | None = None,
        prefix_caching: bool = True,
        pace: StepPace | None = None,
        speculation: Speculation | None = None,
        states: StatePool | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """`window`: keys that a query sees, itself included, in the layer where it sees most.

        `pace` limits prompts beside decodes, `speculation` adds drafts to them, `states` has slots,
        `snapshots` copies of them.

        Raises InputError where a step could not hold one token of every request.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise InputError(
                "max_num_batched_tokens",
                f"expected at least max_num_seqs ({max_num_seqs}), found {max_num_batched_tokens}",
                "a running request must get a token in every step; lower --max-num-seqs",
            )
        self.pool = pool
        self.states = states or StatePool(None)
        self.policy = policy or Policy()
        looks_ahead = speculation is not None and speculation.looks_ahead
        self.cache = PrefixCache(
            pool, enabled=prefix_caching, looks_ahead=looks_ahead, snapshots=snapshots
        )
        self.snapshots = snapshots
        self.pace = pace
        self.speculation = speculation
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.waiting = WaitingLevels(self.policy.max_passes)
        self.places = Places(pool, self.cache, self.states, self.waiting, self.policy, max_num_seqs)
        self.running = self.places.running
        self._admission = Admission(self.places)
        self._prompts = PromptChunks(
            self.places, self._admission, window=window, pace=pace, speculation=speculation
        )
        self._num_steps = 0
        self._num_prompt_steps = 0  # of prompts alone, since the last of another kind

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def check(self, request: Request) -> None:
        """Raise InputError where a request could never finish, however long it waits."""
        longest = request.num_prompt_tokens + request.max_tokens
        # The last sampled token is never fed back, so its keys need no place.
        needed, what = self.pool.pages_for(longest - 1), f"{longest} tokens"
        if request.beams is not None:
            what = f"{len(request.rows)} x {what}"
            needed = request.beams.most_pages(self.pool, self.max_num_seqs)
        if needed > self.pool.num_pages:
            raise InputError(
                f"request {request.request_id}",
                f"needs {needed} KV pages for {what}, and there are {self.pool.num_pages}",
                "shorten it, or give the server more memory for KV pages",
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `check` raises."""
        self.check(request)
        request.num_steps_at_arrival = self._num_steps
        request.level = self.policy.level(request)
        request.client, request.group = self.policy.turn(request)
        self.cache.add(request)
        if self.speculation is not None:
            self.speculation.add(request)
        self.waiting.push(request)

    def schedule(self) -> StepPlan:
        """Plan the next step: mark its tokens as computed and own the pages they need."""
        self._num_steps += 1
        self.places.begin_step()
        if self.snapshots is not None:
            self.snapshots.settle(self.cache.publish)
        counts = Counts(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            num_prompts_begun=len(self.places.begun),
        )
        phase = self.policy.phase(counts)
        if phase is Phase.PROMPTS and self._num_prompt_steps >= MAX_PROMPT_STEPS:
            phase = Phase.DECODES
        most_admitted = self.policy.most_admitted(counts)
        step = OpenStep(budget=self.max_num_batched_tokens, most_admitted=most_admitted)
        self.places.prepare_beams(step)
        if counts.num_waiting:
            self._admission.make_place(step, self._num_steps)
        speculation = self.speculation
        if speculation is not None:
            speculation.begin_step(len(self.running), step.budget)
        first, then = self._plan_decodes, self._prompts.plan
        if phase is Phase.PROMPTS:
            first, then = then, first
        first(step)
        is_first_alone = phase is not Phase.MIXED and bool(step.chunks)
        if not is_first_alone:
            then(step)
        is_of_prompts = is_first_alone and phase is Phase.PROMPTS
        self._num_prompt_steps = self._num_prompt_steps + 1 if is_of_prompts else 0
        return StepPlan(
            chunks=tuple(step.chunks),
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
            moves=self.pool.take_moves() if step.chunks else None,
            state_moves=self.snapshots.take_moves()
            if self.snapshots is not None and step.chunks
            else None,
            drafting=speculation and speculation.end_step(step.chunks),
        )

    def update(
        self,
        plan: StepPlan,
        sampled: list[int | str],
        logprobs: list[TokenLogprobs | None] | None = None,
        num_emitted: list[int] | None = None,
    ) -> list[RequestEvent]:
        """Take the tokens a step sampled, one for each of its sampled rows, in order.

        A string in place of a token is the reason why that row failed: its request ends with it.
        `logprobs`, where any request asked for them, are as many. `num_emitted`: of each chunk that
        samples, how many of its tokens are output; None: all.
        """
        events = []
        emitted = iter(num_emitted or ())
        exports = self.cache.exports is not None
        any_failed = str in set(map(type, sampled))
        row = 0
        for request, _, _, num_sampled in plan.chunks:
            first, row = row, row + num_sampled
            count = next(emitted) if num_emitted and num_sampled else num_sampled
            # A finished one was aborted, or ended by an earlier step while this was in flight.
            if first == row or request.status is Status.FINISHED or request in plan.late:
                continue
            if num_sampled > 1 and num_emitted:
                count = request.settle(num_sampled, count)
                self.speculation.observe(num_sampled - 1, count - 1)
            tokens = sampled[first : first + count]
            failures = [token for token in tokens if type(token) is str] if any_failed else ()
            if failures:
                events.append(self.fail(request, failures[0]))
                continue
            if request.beams is not None:
                event = request.beams.take(request, logprobs[first], self.pool)
                if event is None:
                    continue
            else:
                event = request.extend(tokens, logprobs[first : first + count] if logprobs else ())
            if exports and (event.finish_reason is not None or not request.is_exported):
                self.cache.export(request)
            if event.finish_reason is not None:
                self.finish(request)
            events.append(event)
        assert row == len(sampled), "the samples are not those of the plan"
        return events

    def finish(self, request: Request) -> None:
        """Drop a request, running or waiting, and free its pages.

        A step in flight may still write to them. The next owner's writes come after it on the
        same device queue, so nothing that is read is overwritten. Others can find its full pages,
        which that step does not write to any more.
        """
        if request.status is Status.RUNNING:
            self.places.stop(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request.rows[0])
        if self.speculation is not None:
            self.speculation.finish(request)
        for row in request.rows:
            row.status = Status.FINISHED

    def fail(self, request: Request, reason: str) -> RequestEvent:
        """End a request whose step went wrong. Nobody is to find what it left in its pages."""
        for row in request.rows:
            self.cache.withdraw(row)
        self.finish(request)
        return RequestEvent.failure(request.request_id, reason)

    def keep_private(self, plan: StepPlan) -> None:
        """Publish nothing more of the requests of a step that could not be launched."""
        for chunk in plan.chunks:
            self.cache.keep_private(chunk.request)

    def fail_step(self, plan: StepPlan, reason: str) -> list[RequestEvent]:
        """End the requests of a step that could not be launched, and those that share its pages."""
        requests = {chunk.request: None for chunk in plan.chunks}
        wrong = set() if plan.moves is None else self.pool.doubt(plan.moves)
        for request, start, _, _ in plan.chunks:
            wrong.update(request.block_table[start // self.pool.page_size :])
        wrong.discard(NULL_PAGE)
        # Who was admitted with the step, but waits for a mask, has no tokens in it.
        requests |= {each: None for each in self.running if not wrong.isdisjoint(each.block_table)}
        if self.snapshots is not None:
            # Nobody knows which of the copies before it were made.
            self.snapshots.drop_all()
        if plan.state_moves is not None:
            slots = set(plan.state_moves.restored_to.tolist())
            requests |= {each: None for each in self.running if each.state_slot in slots}
        # one event of a beam search, whose rows all end with the first
        return [
            self.fail(request, reason)
            for request in requests
            if request.status is not Status.FINISHED
        ]

    def reset_prefix_cache(self) -> None:
        """Forget what all pages hold: requests that come find none. Running ones go on."""
        self.cache.reset((*self.running, *self.waiting))

    def check_integrity(self) -> None:
        """Assert that pages and states agree."""
        self.places.check_integrity()
        self.waiting.check_integrity()
        if self.snapshots is not None:
            self.snapshots.check_integrity()

    def _plan_decodes(self, step: OpenStep) -> None:
        # A step has a token for each running request, so there is budget for all. This loop and
        # `update` are what a step of many requests costs in Python: they call as little as can be.
        page_size, chunks = self.pool.page_size, step.chunks
        speculation, snapshots, count = self.speculation, self.snapshots, 1
        publish = self.cache.publish if self.cache.enabled else None
        for index, request in enumerate(self.running):
            num_known = len(request.token_ids)
            end, start = num_known + request.num_pending, request.num_computed
            if end - start != 1 or end - request.num_prompt_tokens >= request.max_tokens:
                continue
            if request.follows_last and request.num_pending:
                continue  # what it may sample next follows from the token in flight
            if request.mask_job is not None and request.lacks_mask:
                continue
            if speculation is not None:
                count = speculation.num_rows(request, end, self.pool)
                if not count:
                    continue
            if end > len(request.block_table) * page_size and not self.places.make_room(
                request, index, step
            ):
                continue
            if self.window is not None:
                # a verify in flight may end before what is planned with
                first = start - max(0, request.num_pending - 1)
                self.pool.give_back_(request.block_table, max(0, first - self.window + 1))
            request.num_computed = start + count
            request.num_pending += count
            chunks.append(Chunk(request, start, count, count))
            if snapshots is not None and not end % page_size:
                snapshots.note(request, end)
            if publish is not None and num_known >= (request.num_published + 1) * page_size:
                publish(request)
        num_tokens = len(chunks) if speculation is None else sum([chunk.count for chunk in chunks])
        step.budget -= num_tokens
