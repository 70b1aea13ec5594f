"""The scheduler: which tokens of which requests the next step computes. Knows no tensors.

A step is a list of chunks (request, start, count) under one token budget. There are no phases
unless the policy (policies.py) makes some: a chunk of a prompt has a large count, a decode has 1.
Decodes come first, so that none waits behind a prompt; then prompts that were begun, oldest first;
then waiting requests are admitted. A prompt that would use up the budget leaves up to half of it to
shorter ones. Whose turn it is stands in waiting_queue.py. One who has nothing running, and waits
because others have all places or pages, gets some of theirs after PATIENCE steps.

A request that is admitted takes over the pages that its tokens have already (PrefixCache, below),
and one whose next page a running request is about to compute waits for that page.

Of steps in flight `schedule()` counts the tokens; `update()` takes them when they reach the host.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable
from operator import attrgetter

from formats.errors import InputError
from qserve.engine.beams import BeamGroup
from qserve.engine.kv_pages import PagePool
from qserve.engine.policies import Counts, Phase, Policy
from qserve.engine.prefix_cache import PrefixCache
from qserve.engine.request import Request, RequestEvent, Status, TokenLogprobs
from qserve.engine.state_slots import StatePool
from qserve.engine.step_pace import StepPace
from qserve.engine.step_plan import Chunk, OpenStep, StepPlan, load_of
from qserve.engine.victims import cheapest_victim, fair_victims, places_of
from qserve.engine.waiting_levels import WaitingLevels
from qserve.engine.waiting_queue import MAX_BYPASSES
from qserve.speculation.speculation import Speculation

# Steps that a request waits before others give way: to compute one again is little beside them.
PATIENCE = 16


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
    ) -> None:
        """`window`: keys that a query sees, itself included, in the layer where it sees most.

        `pace` limits prompts beside decodes, `speculation` adds drafts to them, `states` has slots.

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
        self.cache = PrefixCache(pool, enabled=prefix_caching, looks_ahead=looks_ahead)
        self.pace = pace
        self.speculation = speculation
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.waiting = WaitingLevels(self.policy.max_passes)
        self.running: list[Request] = []  # by level; of one level the last gives way first
        self._begun: list[Request] = []  # of these, in a step, those with a prompt to compute
        self._groups: list[BeamGroup] = []  # of these, beam searches
        self._num_steps = 0

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
        begun = [each for each in self._begun if each.status is Status.RUNNING]
        self._begun = [each for each in begun if each.num_uncomputed > 1]
        counts = Counts(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            num_prompts_begun=len(self._begun),
        )
        phase = self.policy.phase(counts)
        most_admitted = self.policy.most_admitted(counts)
        step = OpenStep(budget=self.max_num_batched_tokens, most_admitted=most_admitted)
        for group in tuple(self._groups):
            self._prepare_beams(group, step)
        if counts.num_waiting:
            self._make_place(step)
        speculation = self.speculation
        if speculation is not None:
            speculation.begin_step(len(self.running), step.budget)
        first, then = self._plan_decodes, self._plan_prompts
        if phase is Phase.PROMPTS:
            first, then = then, first
        first(step)
        if phase is Phase.MIXED or not step.chunks:
            then(step)
        return StepPlan(
            chunks=tuple(step.chunks),
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
            moves=self.pool.take_moves() if step.chunks else None,
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
            self._stop_running(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request.rows[0])
        if self.speculation is not None:
            self.speculation.finish(request)
        for row in request.rows:
            row.status = Status.FINISHED

    def fail(self, request: Request, reason: str) -> RequestEvent:
        """End a request whose step went wrong. Nobody is to find what it left in its pages."""
        for row in request.rows:
            self.pool.withdraw(row.block_table)
            self.cache.keep_private(row)
        self.finish(request)
        return RequestEvent.failure(request.request_id, reason)

    def reset_prefix_cache(self) -> None:
        """Forget what all pages hold: requests that come find none. Running ones go on."""
        self.cache.reset((*self.running, *self.waiting))

    def check_integrity(self) -> None:
        """Assert that pages and states agree."""
        self.pool.check_integrity([request.block_table for request in self.running])
        self.states.check_integrity(self.running, list(self.waiting))
        levels = [request.level for request in self.running]
        if levels != sorted(levels):
            raise AssertionError("requests of a lower level would give way first")
        self.waiting.check_integrity()

    def _make_place(self, step: OpenStep) -> None:
        """Preempt running requests for one of a lower level, or for one who has nothing.

        The latter waits PATIENCE steps before. Each request gives way MAX_BYPASSES times at most.
        """
        waiting = self.waiting.first_queue
        first = waiting.first()
        if first is None or step.most_admitted < 1:
            return
        if self.running and first.level < self.running[-1].level and self._is_ready(first, step):
            if self._has_place(first, step):
                return
            higher = [each for each in self.running if each.level > first.level]
            victims = places_of(higher, self.pool, first, MAX_BYPASSES)
            if victims is not None:
                self._admit_in_place_of(victims, first, step)
                return
        request, ahead = waiting.first_in_turn(), waiting.first_preempted
        if request is None or not self._is_ready(request, step):
            return
        victims = None
        if self._num_steps - request.num_steps_at_arrival > PATIENCE:
            if ahead is None:
                may_go = not self._has_place(request, step)  # else it is admitted without this
            else:
                may_go = ahead.num_bypasses < MAX_BYPASSES and ahead.flow != request.flow
            if may_go:
                has_place = self._has_place(request, step)
                victims = fair_victims(self.running, self.pool, request, has_place, MAX_BYPASSES)
        if victims is not None:
            if ahead is not None:
                ahead.num_bypasses += 1
            self._admit_in_place_of(victims, request, step)

    def _is_ready(self, request: Request, step: OpenStep) -> bool:
        """Whether others may give way to one that waits; not to one that was pushed out now."""
        if request.beams is not None:
            return False  # those behind it wait until there are places for all its rows
        return not (request.num_pending or request in step.preempted or self._is_held(request))

    def _admit_in_place_of(self, victims: list[Request], request: Request, step: OpenStep) -> None:
        """Preempt running requests, and let another run."""
        for victim in victims:
            if victim.status is Status.RUNNING:  # not with another row of its beam search
                self._preempt(victim, step)
        for each in set(victims):
            each.num_bypasses += 1
        # Behind the oldest, which then always comes to its end. As the youngest it would be the
        # first to give way when pages run out.
        self._admit(request, step, seniority=1)

    def _plan_decodes(self, step: OpenStep) -> None:
        # A step has a token for each running request, so there is budget for all. This loop and
        # `update` are what a step of many requests costs in Python: they call as little as can be.
        page_size, chunks = self.pool.page_size, step.chunks
        speculation, count = self.speculation, 1
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
            if end > len(request.block_table) * page_size and not self._make_room(
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
            if publish is not None and num_known >= (request.num_published + 1) * page_size:
                publish(request)
        num_tokens = len(chunks) if speculation is None else sum([chunk.count for chunk in chunks])
        step.budget -= num_tokens

    def _plan_prompts(self, step: OpenStep) -> None:
        begun = [each for each in self._begun if each.status is Status.RUNNING]
        begun = deque(sorted(begun, key=attrgetter("num_steps_at_arrival")))
        self._limit_prompts(step, begun)
        while step.budget > 0:
            request = begun.popleft() if begun else self._admit_first(step)
            if request is None:
                break
            if request.num_uncomputed > step.budget:
                self._plan_shorter(request, begun, step)
            self._take(request, min(request.num_uncomputed, step.budget), step)

    def _limit_prompts(self, step: OpenStep, begun: Collection[Request]) -> None:
        """Lower the budget to what lets the step end in time for those that decode in it."""
        if self.pace is None or step.budget <= 0:
            return
        first = begun[0] if begun else self.waiting.first_queue.first()
        if first is None:
            return
        load = load_of(step.chunks)
        step.budget = self.pace.max_prompt_tokens(load, first.num_computed, step.budget)

    def _plan_shorter(self, longest: Request, begun: Collection[Request], step: OpenStep) -> None:
        """Give half of the budget to what is shorter than the oldest prompt that is not done.

        The oldest gets the other half at least, so it is not kept from its end.
        """
        begun = sorted(begun, key=attrgetter("num_uncomputed"))
        share = step.budget // 2
        flows = {longest.flow, *(each.flow for each in begun)}
        shortest = (begun or [longest])[0].num_uncomputed
        waiting = self.waiting.first_queue
        while share > 0 and step.most_admitted > 0:
            request = waiting.first_shorter(shortest, other_than=flows)
            if request is None and not begun:
                request = waiting.passed_over(other_than=flows)
            if request is None or self._is_held(request) or not self._has_place(request, step):
                break
            self._admit(request, step, len(self.running))
            waiting = self.waiting.first_queue
            share -= self._take(request, min(request.num_uncomputed, share), step)
        for request in begun:
            if share > 0:
                share -= self._take(request, min(request.num_uncomputed, share), step)

    def _admit_first(self, step: OpenStep) -> Request | None:
        """The next request that waits, running now, or None where there is no place for it."""
        if step.most_admitted < 1 or not len(self.waiting):
            return None
        for request in self._candidates(step):
            if self._is_held(request):
                continue
            if not self._has_place(request, step):
                return None
            self._admit(request, step, len(self.running))
            return request
        return None

    def _candidates(self, step: OpenStep) -> Iterable[Request]:
        """Whom to admit, the first choice first."""
        waiting = self.waiting.first_queue
        if waiting.must_take_first or type(self.policy).order is Policy.order:
            return waiting.candidates()
        # Once a step: to look for the cached pages of all takes longer than to admit one.
        step.ordered = [each for each in step.ordered if each.status is Status.WAITING]
        if not step.ordered:
            step.ordered = list(self.policy.order(waiting.candidates(), self.cache.num_cached))
        return step.ordered

    def _is_held(self, request: Request) -> bool:
        """Whether a running request is about to compute the page that this one needs first.

        It waits for that page, unless it has been passed over too often or lost its own pages.
        """
        if self.waiting.first_queue.must_take_first:
            return False
        return any(
            each.num_uncomputed > 1 and self.cache.will_share(request, each) for each in self._begun
        )

    def _has_place(self, request: Request, step: OpenStep) -> bool:
        # The whole known length must fit, not only its first chunk, or two long prompts would push
        # each other out in turns. One that was pushed out just now has to wait for the next step.
        num_places = min(self.max_num_seqs - len(self.running), self.states.num_free)
        if len(request.rows) > num_places:
            return False
        if any(row.num_pending for row in request.rows) or request in step.preempted:
            return False
        of_beams = 0 if request.beams is None else request.beams.num_other_pages(self.pool)
        num_free = self.pool.num_free - of_beams
        return self.cache.num_pages_needed(request, num_free) <= num_free

    def _admit(self, request: Request, step: OpenStep, seniority: int) -> None:
        """Let a request run, with the pages that are there for it and new ones for the rest."""
        assert not request.num_pending, "pushed out and back in one step, its token in flight"
        self.waiting.admit(request)
        self.policy.admitted(request)
        step.most_admitted -= 1
        request.status = Status.RUNNING
        self.states.take_(request)
        self.cache.take_(request)
        if not request.num_preemptions:
            step.admitted.append(request)
        of_level = {"a": self.running, "x": request.level, "key": attrgetter("level")}
        place = min(max(seniority, bisect_left(**of_level)), bisect_right(**of_level))
        self.running[place:place] = request.rows
        if request.num_uncomputed > 1:
            self._begun.append(request)
        if request.beams is not None:
            request.beams.take_pages(self.pool)
            self._groups.append(request.beams)

    def _take(self, request: Request, count: int, step: OpenStep) -> int:
        """Add the next `count` tokens of a request to the step. Returns how many it got."""
        start = request.num_computed
        if request.follows_last and request.lacks_mask and start + count == request.num_tokens:
            count -= 1  # the last of them would sample
            if not count:
                return 0
        if self.window is not None:
            # A step in flight may still read these pages: who gets them writes after it.
            self.pool.give_back_(request.block_table, max(0, start - self.window + 1))
        num_sampled = int(start + count == request.num_tokens)
        request.num_computed += count
        request.num_pending += num_sampled
        step.chunks.append(Chunk(request, start, count, num_sampled))
        step.budget -= count
        # From here on: a layer writes all keys of a step before any of them is read.
        self.cache.publish(request)
        return count

    def _make_room(self, request: Request, index: int, step: OpenStep) -> bool:
        """Own pages for one more position, pushing out younger requests where needed.

        `index`: of the request in `running`. The victims stand behind it, which this step has not
        reached yet; the last resort is `request` itself. Returns False where it had to go.
        """
        needed = request.num_computed + 1
        while not self.pool.can_grow(request.block_table, needed):
            if not self._free_pages(request, index, step):
                return False
        self.pool.grow_(request.block_table, needed)
        return True

    def _free_pages(self, request: Request, index: int, step: OpenStep) -> bool:
        """Push out one that stands behind `index`. Returns False where it was `request` itself."""
        others = [each for each in self.running[index + 1 :] if each not in request.rows]
        victim = cheapest_victim(others, self.pool) or request
        self._preempt(victim, step)
        return victim is not request

    def _prepare_beams(self, group: BeamGroup, step: OpenStep) -> None:
        """Let the rows of a beam search write: each to pages of its own, or begin again."""
        if group.first.status is not Status.RUNNING:
            return  # another search took its pages
        self._begun += [row for row in group.resume() if row.num_uncomputed > 1]
        for row in group.rows_to_own(self.pool):
            while not self.pool.num_free:
                if not self._free_pages(row, self.running.index(row), step):
                    return
            group.own_last_page(row, self.pool)

    def _preempt(self, request: Request, step: OpenStep) -> None:
        """Take a request's pages; it waits, first in line, and computes its tokens again.

        Those of its pages that nobody needs meanwhile it finds again. The rows of a beam search go
        together: none could go on without the others.
        """
        if request.beams is not None:
            request.beams.withdraw(step.chunks, self.pool)
        self._stop_running(request)
        for row in request.rows:
            row.wait_again()
        self.waiting.push_front(request.rows[0])
        step.preempted.append(request.rows[0])

    def _stop_running(self, request: Request) -> None:
        """Take a request out of those that run; others can find its full pages."""
        if request.beams is not None:
            self._groups.remove(request.beams)
        for row in request.rows:
            self.running.remove(row)
            self.cache.publish(row)
            self.pool.release_(row.block_table)
            self.states.give_back_(row)
