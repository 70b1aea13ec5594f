"""RunningSet: slots, KV pages and states of running requests, and preemption."""

from bisect import bisect_left, bisect_right
from operator import attrgetter

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.kv_cache.prefix_cache import PrefixCache
from qserve.engine.kv_cache.state_slots import StatePool
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.beams import BeamGroup
from qserve.engine.scheduling.memory_forecast import MemoryForecast
from qserve.engine.scheduling.plan import OpenStep
from qserve.engine.scheduling.policies import Policy
from qserve.engine.scheduling.preemption import cheapest_victim
from qserve.engine.scheduling.waiting_queue import WaitingLevels


class RunningSet:
    """The running requests of one scheduler, and the resources that they share."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        states: StatePool,
        waiting: WaitingLevels,
        policy: Policy,
        max_num_seqs: int,
        forecast: MemoryForecast | None = None,
    ) -> None:
        """`forecast`: delays requests that fit now but are not expected to fit until their end."""
        self.forecast = forecast
        self.pool, self.cache, self.states = pool, cache, states
        self.waiting, self.policy = waiting, policy
        self.max_num_seqs = max_num_seqs
        self.running: list[Request] = []  # by level; within a level the last is preempted first
        self.begun: list[Request] = []  # running requests with prompt tokens left to compute
        self._groups: list[BeamGroup] = []  # running beam searches

    @property
    def num_free_slots(self) -> float:
        """Number of requests that may run in addition to the running ones."""
        return min(self.max_num_seqs - len(self.running), self.states.num_free)

    def begin_step(self) -> None:
        """Start planning a step: update `begun`."""
        if self.forecast is not None:
            self.forecast.begin_step()
        begun = [each for each in self.begun if each.status is Status.RUNNING]
        self.begun = [each for each in begun if each.num_uncomputed > 1]

    def prepare_beams(self, step: OpenStep) -> None:
        """Prepare beam searches: resume rows, and copy shared pages that rows will write to."""
        for group in tuple(self._groups):
            self._prepare(group, step)

    def fits(self, request: Request, step: OpenStep) -> bool:
        """Return True if a waiting request fits with all of its tokens, without a preemption."""
        # The whole known length must fit, not only the first chunk; otherwise two long prompts
        # would preempt each other in turn. A request preempted in this step waits for the next
        # step.
        if len(request.rows) > self.num_free_slots:
            return False
        if any(row.num_pending for row in request.rows) or request in step.preempted:
            return False
        of_beams = 0 if request.beams is None else request.beams.num_other_pages(self.pool)
        num_free = self.pool.num_free - of_beams
        return self.cache.num_pages_needed(request, num_free) <= num_free

    def lasts(self, request: Request) -> bool:
        """Return True if a request that fits now is also expected to fit until it ends."""
        if self.forecast is None:
            return True
        num_needed = self.cache.num_pages_needed(request, self.pool.num_free)
        return self.forecast.allows(request, self.running, num_needed)

    def admit(self, request: Request, step: OpenStep, seniority: int) -> None:
        """Move a request to the running set: reuse cached pages and allocate the others.

        `seniority`: desired index in `running`; it is limited to the request's level.
        """
        assert not request.num_pending, "readmitted with a token in flight"
        self.waiting.admit(request)
        self.policy.admitted(request)
        step.max_admitted -= 1
        request.status = Status.RUNNING
        for row in request.rows:
            self.states.take_(row)
        self.cache.take_(request)
        if not request.facts.num_preemptions:
            step.admitted.append(request)
        of_level = {"a": self.running, "x": request.level, "key": attrgetter("level")}
        place = min(max(seniority, bisect_left(**of_level)), bisect_right(**of_level))
        self.running[place:place] = request.rows
        if request.num_uncomputed > 1:
            self.begun.append(request)
        if request.beams is not None:
            request.beams.take_pages(self.pool)
            self._groups.append(request.beams)

    def make_room(self, request: Request, index: int, step: OpenStep) -> bool:
        """Allocate a page for one more position, preempting younger requests if necessary.

        `index`: index of the request in `running`. Victims are requests after it, which the step
        has not planned yet; the last resort is `request` itself. Returns False if `request` was
        preempted.
        """
        needed = request.num_slots(request.num_computed + 1)
        while not self.pool.can_grow(request.block_table, needed):
            if not self._free_pages(request, index, step):
                return False
        self.pool.grow_(request.block_table, needed)
        return True

    def preempt(self, request: Request, step: OpenStep) -> None:
        """Free a request's pages and put it at the front of the queue. It recomputes its tokens.

        It reuses those of its pages that are not evicted meanwhile. All rows of a beam search are
        preempted together, since no row can continue without the others.
        """
        if request.beams is not None:
            request.beams.leave_step(step.chunks, self.pool)
        self.stop(request)
        for row in request.rows:
            row.reset_after_preemption()
        self.waiting.push_front(request.rows[0])
        step.preempted.append(request.rows[0])

    def stop(self, request: Request) -> None:
        """Remove a request from the running set. Its full pages stay in the prefix cache."""
        if request.beams is not None:
            self._groups.remove(request.beams)
        for row in request.rows:
            self.running.remove(row)
            self.cache.insert(row)
            self.pool.release_(row.block_table)
            self.states.release_(row)

    def check_integrity(self) -> None:
        """Assert that pages and states are consistent and that levels are in order."""
        self.pool.check_integrity([request.block_table for request in self.running])
        self.states.check_integrity(self.running, list(self.waiting))
        levels = [request.level for request in self.running]
        if levels != sorted(levels):
            raise AssertionError("running requests are not sorted by level")

    def _free_pages(self, request: Request, index: int, step: OpenStep) -> bool:
        """Preempt a request after `index`, or else `request` itself. Returns False if itself."""
        others = [each for each in self.running[index + 1 :] if each not in request.rows]
        victim = cheapest_victim(others, self.pool) or request
        if self.forecast is not None:
            self.forecast.note_preemption()
        self.preempt(victim, step)
        return victim is not request

    def _prepare(self, group: BeamGroup, step: OpenStep) -> None:
        if group.first.status is not Status.RUNNING:
            return  # it was preempted for another beam search
        self.begun += [row for row in group.resume() if row.num_uncomputed > 1]
        for row in group.rows_to_own(self.pool):
            while not self.pool.num_free:
                if not self._free_pages(row, self.running.index(row), step):
                    return
            group.own_last_page(row, self.pool)
