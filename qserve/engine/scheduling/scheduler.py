"""Scheduler: decides which tokens of which requests the next step computes.

A step is a list of chunks (request, start, count) under one token budget. There are no phases
unless the policy (policies.py) defines them: a prompt chunk has a large count, a decode has 1.
Decodes are planned first, so that no decode waits for a prompt; then started prompts
(chunked_prefill.py); then waiting requests are admitted (admission.py), as far as slots and memory
allow (running_set.py). An admitted request reuses the pages that are cached for its tokens
(prefix_cache.py).

`schedule()` counts tokens that in-flight steps will sample; `update()` applies the tokens when they
reach the host.
"""

from collections.abc import Collection

from formats.errors import InputError
from qserve.engine.kv_cache.block_pool import NULL_PAGE, BlockPool
from qserve.engine.kv_cache.prefix_cache import PrefixCache
from qserve.engine.kv_cache.state_slots import StatePool
from qserve.engine.kv_cache.state_snapshots import StateMoves, StateSnapshots
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.admission import Admission
from qserve.engine.scheduling.chunked_prefill import ChunkedPrefill
from qserve.engine.scheduling.encoder_budget import EncoderBudget
from qserve.engine.scheduling.itl_control import ItlControl
from qserve.engine.scheduling.memory_forecast import MemoryForecast
from qserve.engine.scheduling.plan import Chunk, OpenStep, StepPlan
from qserve.engine.scheduling.policies import MAX_PROMPT_STEPS, Counts, Phase, Policy
from qserve.engine.scheduling.running_set import RunningSet
from qserve.engine.scheduling.speculation import Speculation
from qserve.engine.scheduling.waiting_queue import WaitingLevels
from qserve.engine.token_event import TokenEvent, TokenLogprobs


class Scheduler:
    """One token budget, one waiting queue, one block pool."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        policy: Policy | None = None,
        prefix_caching: bool = True,
        pace: ItlControl | None = None,
        speculation: Speculation | None = None,
        states: StatePool | None = None,
        snapshots: StateSnapshots | None = None,
        encoder: EncoderBudget | None = None,
        forecasts: bool = False,
    ) -> None:
        """Raises InputError if a step cannot hold one token of every request.

        `window`: largest number of keys, over all layers, that a query attends to, itself included;
        None: all keys. `pace`: limits prompts in steps that decode. `speculation`: adds drafts to
        decodes. `states`: state slots. `snapshots`: state snapshots. `encoder`: budget for media.
        `forecasts`: True: a request starts only if the KV pages are expected to last until the
        running requests end; False: it starts as soon as its prompt fits.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise InputError(
                "max_num_batched_tokens",
                f"expected at least max_num_seqs ({max_num_seqs}), found {max_num_batched_tokens}",
                "lower --max-num-seqs: a running request needs a token in every step",
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
        self.encoder = encoder
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.waiting = WaitingLevels(self.policy.max_passes)
        # With a window in all layers, a request's pages do not grow beyond the window.
        forecast = MemoryForecast(pool) if forecasts and window is None else None
        self.running_set = RunningSet(
            pool, self.cache, self.states, self.waiting, self.policy, max_num_seqs, forecast
        )
        self.running = self.running_set.running
        self._admission = Admission(self.running_set)
        self._prompts = ChunkedPrefill(
            self.running_set,
            self._admission,
            window=window,
            pace=pace,
            speculation=speculation,
            encoder=encoder,
        )
        self._num_steps = 0
        self._num_prompt_steps = 0  # consecutive prompt-only steps

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def check(self, request: Request) -> None:
        """Raise InputError if a request could never finish."""
        longest = request.num_prompt_tokens + request.max_tokens
        # The last sampled token is never an input, so its keys need no slot in a page.
        needed, what = self.pool.pages_for(request.num_slots(longest - 1)), f"{longest} tokens"
        if request.beams is not None:
            what = f"{len(request.rows)} x {what}"
            needed = request.beams.max_pages(self.pool, self.max_num_seqs)
        if needed > self.pool.num_pages:
            raise InputError(
                f"request {request.request_id}",
                f"needs {needed} KV pages for {what}, but only {self.pool.num_pages} exist",
                "shorten it, or give the server more memory for KV pages",
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises InputError if it could never finish."""
        self.check(request)
        request.num_steps_at_arrival = self._num_steps
        request.level = self.policy.level(request)
        request.client, request.group = self.policy.turn(request)
        self.cache.add(request)
        if self.speculation is not None:
            self.speculation.add(request)
        self.waiting.push(request)

    def schedule(self) -> StepPlan:
        """Plan the next step: mark its tokens as computed and allocate the pages they need."""
        self._num_steps += 1
        self.running_set.begin_step()
        if self.snapshots is not None:
            self.snapshots.settle(self.cache.insert)
        if self.encoder is not None:
            self.encoder.begin_step()
        counts = Counts(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            num_prompts_begun=len(self.running_set.begun),
        )
        phase = self.policy.phase(counts)
        if phase is Phase.PROMPTS and self._num_prompt_steps >= MAX_PROMPT_STEPS:
            phase = Phase.DECODES
        max_admitted = self.policy.max_admitted(counts)
        step = OpenStep(budget=self.max_num_batched_tokens, max_admitted=max_admitted)
        self.running_set.prepare_beams(step)
        if counts.num_waiting:
            self._admission.preempt_for_waiting(step, self._num_steps)
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
            state_moves=self._take_state_moves() if step.chunks else None,
            drafting=speculation and speculation.end_step(step.chunks),
            media=self.encoder.end_step() if self.encoder is not None and step.chunks else None,
        )

    def _take_state_moves(self) -> StateMoves | None:
        """Return the copies of states to make before the next step, or None."""
        moves = None if self.snapshots is None else self.snapshots.take_moves()
        forks = self.states.take_forks()
        return (moves or StateMoves()).with_forks(forks) if forks else moves

    def update(
        self,
        plan: StepPlan,
        sampled: list[int | str],
        logprobs: list[TokenLogprobs | None] | None = None,
        num_emitted: list[int] | None = None,
    ) -> list[TokenEvent]:
        """Apply the tokens that a step sampled: one per sampled row, in order.

        `sampled`: a string instead of a token is the error of a failed row, which ends the request.
        `logprobs`: one entry per sampled row, if any request asked for them. `num_emitted`: number
        of output tokens of each chunk that samples; None: all.
        """
        events = []
        emitted = iter(num_emitted or ())
        exports = self.cache.exports is not None
        any_failed = str in set(map(type, sampled))
        row = 0
        for request, _, _, num_sampled in plan.chunks:
            first, row = row, row + num_sampled
            count = next(emitted) if num_emitted and num_sampled else num_sampled
            # A request may be finished: aborted, or ended by an earlier step during this step.
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
                event = request.beams.take(request, logprobs[first], self.pool, self.states)
                if event is None:
                    continue
            else:
                event = request.extend(tokens, logprobs[first : first + count] if logprobs else ())
            if exports and (event.finish_reason is not None or not request.is_exported):
                self.cache.export(request)
            if event.finish_reason is not None:
                self.finish(request)
            events.append(event)
        assert row == len(sampled), "the number of samples differs from the plan"
        return events

    def finish(self, request: Request) -> None:
        """Remove a running or waiting request and free its pages.

        An in-flight step may still write to these pages. The next owner writes to them later on the
        same stream, so nothing that is read is overwritten. Full pages stay in the prefix cache:
        the in-flight step does not write to them.
        """
        if request.status is Status.RUNNING:
            if self.running_set.forecast is not None:
                self.running_set.forecast.note_end(request)
            self.running_set.stop(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request.rows[0])
        if self.speculation is not None:
            self.speculation.finish(request)
        for row in request.rows:
            row.status = Status.FINISHED

    def fail(self, request: Request, reason: str) -> TokenEvent:
        """End a request whose step failed, and remove its pages from the prefix cache."""
        for row in request.rows:
            self.cache.invalidate(row)
        self.finish(request)
        return TokenEvent.failure(request.request_id, reason)

    def keep_private(self, plan: StepPlan) -> None:
        """Insert no further pages of a plan's requests, because the step could not be launched."""
        for chunk in plan.chunks:
            self.cache.keep_private(chunk.request)

    def fail_step(self, plan: StepPlan, reason: str) -> list[TokenEvent]:
        """End the requests of a step that could not be launched, and requests sharing its pages."""
        requests = {chunk.request: None for chunk in plan.chunks}
        wrong = set() if plan.moves is None else self.pool.invalidate_moves(plan.moves)
        for request, start, _, _ in plan.chunks:
            wrong.update(request.block_table[start // self.pool.page_size :])
        wrong.discard(NULL_PAGE)
        # A request that was admitted but waits for a mask has no chunk in the step.
        requests |= {each: None for each in self.running if not wrong.isdisjoint(each.block_table)}
        if self.snapshots is not None:
            self.snapshots.invalidate_moves(plan.state_moves)
        if plan.state_moves is not None:
            slots = plan.state_moves.started
            requests |= {each: None for each in self.running if each.state_slot in slots}
        if self.encoder is not None:
            self.encoder.reset()
        # One event per beam search: failing one row ends all rows.
        return [
            self.fail(request, reason)
            for request in requests
            if request.status is not Status.FINISHED
        ]

    def preempt_all(self) -> None:
        """Preempt all running requests and keep their order. No step may be in flight."""
        step = OpenStep(budget=0, max_admitted=0)
        while self.running:
            self.running_set.preempt(self.running[-1], step)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests continue."""
        self.cache.reset((*self.running, *self.waiting))

    def check_integrity(self) -> None:
        """Assert that pages, states and queues are consistent."""
        self.running_set.check_integrity()
        self.waiting.check_integrity()
        if self.snapshots is not None:
            self.snapshots.check_integrity()

    def _without_room_to_encode(self) -> Collection[Request]:
        """Return requests whose last prompt token needs an item that the step cannot encode."""
        encoder = self.encoder
        if encoder is None:
            return ()
        last = [each for each in self.running if each.num_computed < each.media_end]
        last = [each for each in last if each.num_uncomputed == 1]
        return {each for each in last if not encoder.take(each, each.num_computed, 1)}

    def _plan_decodes(self, step: OpenStep) -> None:
        # The budget has at least one token for each running request. This loop and `update` are
        # most of the Python cost of a step with many requests, so they make few calls.
        page_size, chunks = self.pool.page_size, step.chunks
        speculation, snapshots, count = self.speculation, self.snapshots, 1
        held = self._without_room_to_encode()
        insert = self.cache.insert if self.cache.enabled else None
        for index, request in enumerate(self.running):
            num_known = len(request.token_ids)
            end, start = num_known + request.num_pending, request.num_computed
            if end - start != 1 or end - request.num_prompt_tokens >= request.max_tokens:
                continue
            if request in held or (request.follows_last and request.num_pending):
                continue  # its next token depends on an in-flight token, or on an item to encode
            if request.mask_job is not None and request.lacks_mask:
                continue
            if speculation is not None:
                count = speculation.num_rows(request, end, self.pool)
                if not count:
                    continue
            if end > len(request.block_table) * page_size and not self.running_set.make_room(
                request, index, step
            ):
                continue
            if self.window is not None:
                # An in-flight verify may accept fewer tokens than planned.
                first = start - max(0, request.num_pending - 1)
                self.pool.release_before_(request.block_table, max(0, first - self.window + 1))
            if snapshots is not None:
                if speculation is not None:
                    snapshots.note_verify(request, start, count)
                elif not end % page_size:
                    snapshots.note(request, end)
            request.num_computed = start + count
            request.num_pending += count
            chunks.append(Chunk(request, start, count, count))
            if insert is not None and num_known >= (request.num_inserted + 1) * page_size:
                insert(request)
        num_tokens = len(chunks) if speculation is None else sum([chunk.count for chunk in chunks])
        step.budget -= num_tokens
