"""Places: what running requests hold, a seat, KV pages and a state, and who gives way for them.

Knows no budget of tokens. Of one level the last of `running` gives way first.
"""

from bisect import bisect_left, bisect_right
from operator import attrgetter

from qserve.engine.beams import BeamGroup
from qserve.engine.kv_pages import PagePool
from qserve.engine.policies import Policy
from qserve.engine.prefix_cache import PrefixCache
from qserve.engine.request import Request, Status
from qserve.engine.state_slots import StatePool
from qserve.engine.step_plan import OpenStep
from qserve.engine.victims import cheapest_victim
from qserve.engine.waiting_levels import WaitingLevels


class Places:
    """The running requests of one scheduler, and what they share."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        states: StatePool,
        waiting: WaitingLevels,
        policy: Policy,
        max_num_seqs: int,
    ) -> None:
        self.pool, self.cache, self.states = pool, cache, states
        self.waiting, self.policy = waiting, policy
        self.max_num_seqs = max_num_seqs
        self.running: list[Request] = []  # by level; of one level the last gives way first
        self.begun: list[Request] = []  # of these, in a step, those with a prompt to compute
        self._groups: list[BeamGroup] = []  # of these, beam searches

    @property
    def num_seats(self) -> float:
        """Requests that may run beside those that do."""
        return min(self.max_num_seqs - len(self.running), self.states.num_free)

    def begin_step(self) -> None:
        """Look who is amid a prompt."""
        begun = [each for each in self.begun if each.status is Status.RUNNING]
        self.begun = [each for each in begun if each.num_uncomputed > 1]

    def prepare_beams(self, step: OpenStep) -> None:
        """Let the rows of each beam search write to pages of their own, or begin again."""
        for group in tuple(self._groups):
            self._prepare(group, step)

    def has_place(self, request: Request, step: OpenStep) -> bool:
        """Whether a waiting request can run with all of its tokens, nobody giving way for it."""
        # The whole known length must fit, not only its first chunk, or two long prompts would push
        # each other out in turns. One that was pushed out just now has to wait for the next step.
        if len(request.rows) > self.num_seats:
            return False
        if any(row.num_pending for row in request.rows) or request in step.preempted:
            return False
        of_beams = 0 if request.beams is None else request.beams.num_other_pages(self.pool)
        num_free = self.pool.num_free - of_beams
        return self.cache.num_pages_needed(request, num_free) <= num_free

    def admit(self, request: Request, step: OpenStep, seniority: int) -> None:
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
            self.begun.append(request)
        if request.beams is not None:
            request.beams.take_pages(self.pool)
            self._groups.append(request.beams)

    def make_room(self, request: Request, index: int, step: OpenStep) -> bool:
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

    def preempt(self, request: Request, step: OpenStep) -> None:
        """Take a request's pages; it waits, first in line, and computes its tokens again.

        Those of its pages that nobody needs meanwhile it finds again. The rows of a beam search go
        together: none could go on without the others.
        """
        if request.beams is not None:
            request.beams.withdraw(step.chunks, self.pool)
        self.stop(request)
        for row in request.rows:
            row.wait_again()
        self.waiting.push_front(request.rows[0])
        step.preempted.append(request.rows[0])

    def stop(self, request: Request) -> None:
        """Take a request out of those that run; others can find its full pages."""
        if request.beams is not None:
            self._groups.remove(request.beams)
        for row in request.rows:
            self.running.remove(row)
            self.cache.publish(row)
            self.pool.release_(row.block_table)
            self.states.give_back_(row)

    def check_integrity(self) -> None:
        """Assert that pages and states agree, and that levels stand in order."""
        self.pool.check_integrity([request.block_table for request in self.running])
        self.states.check_integrity(self.running, list(self.waiting))
        levels = [request.level for request in self.running]
        if levels != sorted(levels):
            raise AssertionError("requests of a lower level would give way first")

    def _free_pages(self, request: Request, index: int, step: OpenStep) -> bool:
        """Push out one that stands behind `index`. Returns False where it was `request` itself."""
        others = [each for each in self.running[index + 1 :] if each not in request.rows]
        victim = cheapest_victim(others, self.pool) or request
        self.preempt(victim, step)
        return victim is not request

    def _prepare(self, group: BeamGroup, step: OpenStep) -> None:
        if group.first.status is not Status.RUNNING:
            return  # another search took its pages
        self.begun += [row for row in group.resume() if row.num_uncomputed > 1]
        for row in group.rows_to_own(self.pool):
            while not self.pool.num_free:
                if not self._free_pages(row, self.running.index(row), step):
                    return
            group.own_last_page(row, self.pool)
