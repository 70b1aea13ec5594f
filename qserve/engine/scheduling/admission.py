"""Admission of waiting requests, and preemption on their behalf.

The waiting queue (waiting_queue.py) decides which request is next. It is admitted as soon as it
fits and is expected to fit until its end (memory_forecast.py). If a client or group runs nothing
because others hold all slots or pages, running requests are preempted for it after PATIENCE steps.
A request whose next page is about to be computed by a running request waits for that page.
"""

from collections.abc import Collection, Iterable

from qserve.engine.request import Flow, Request, Status
from qserve.engine.scheduling.plan import OpenStep
from qserve.engine.scheduling.policies import Policy
from qserve.engine.scheduling.preemption import fair_victims, victims_for
from qserve.engine.scheduling.running_set import RunningSet
from qserve.engine.scheduling.waiting_queue import MAX_BYPASSES

# Number of steps that a request waits before others are preempted for it. Recomputing a preempted
# request costs little compared with that wait.
PATIENCE = 16


class Admission:
    """Moves requests from a scheduler's waiting queue to its running set."""

    def __init__(self, running_set: RunningSet) -> None:
        self._running_set = running_set
        self._waiting, self._policy = running_set.waiting, running_set.policy

    def preempt_for_waiting(self, step: OpenStep, num_steps: int) -> None:
        """Preempt running requests for a waiting one of a lower level or of an idle client.

        A request of a client or group that runs nothing must first wait PATIENCE steps;
        `num_steps` is the number of steps so far. A request is preempted at most MAX_BYPASSES
        times.
        """
        running_set, running = self._running_set, self._running_set.running
        waiting = self._waiting.first_queue
        first = waiting.first()
        if first is None or step.max_admitted < 1:
            return
        if running and first.level < running[-1].level and self._is_ready(first, step):
            if running_set.fits(first, step):
                if not running_set.lasts(first):
                    self._admit_instead_of([], first, step)
                return
            higher = [each for each in running if each.level > first.level]
            victims = victims_for(higher, running_set.pool, first, MAX_BYPASSES)
            if victims is not None:
                self._admit_instead_of(victims, first, step)
                return
        request, ahead = waiting.first_in_turn(), waiting.first_preempted
        if request is None or not self._is_ready(request, step):
            return
        victims = None
        if num_steps - request.num_steps_at_arrival > PATIENCE:
            fits = running_set.fits(request, step)
            if ahead is None:
                may_preempt = not fits  # if it fits, it is admitted without preemption
            else:
                may_preempt = ahead.num_bypasses < MAX_BYPASSES and ahead.flow != request.flow
            if may_preempt:
                victims = fair_victims(running, running_set.pool, request, fits, MAX_BYPASSES)
            elif fits and not running_set.lasts(request) and _runs_nothing(request.client, running):
                victims = []
        if victims is not None:
            if ahead is not None:
                ahead.num_bypasses += 1
            self._admit_instead_of(victims, request, step)

    def admit_first(self, step: OpenStep) -> Request | None:
        """Admit the next waiting request. Returns None if there is no slot or memory for it."""
        if step.max_admitted < 1 or not len(self._waiting) or self._running_set.num_free_slots < 1:
            return None  # checked first, because ordering all waiting requests is expensive
        for request in self._candidates(step):
            if self._is_held(request):
                continue
            if not self._starts(request, step):
                return None
            self._admit_last(request, step)
            return request
        return None

    def admit_shorter(
        self, num_tokens: int, flows: Collection[Flow], step: OpenStep, *, or_oldest: bool
    ) -> Request | None:
        """Admit a request that is shorter than `num_tokens` and belongs to none of `flows`.

        `or_oldest`: if there is none, try the request that has been passed over too often. Returns
        None if nothing was admitted.
        """
        if step.max_admitted < 1:
            return None
        waiting = self._waiting.first_queue
        request = waiting.first_shorter(num_tokens, other_than=flows)
        if request is None and or_oldest:
            request = waiting.passed_over(other_than=flows)
        if request is None or self._is_held(request) or not self._starts(request, step):
            return None
        self._admit_last(request, step)
        return request

    def _starts(self, request: Request, step: OpenStep) -> bool:
        return self._running_set.fits(request, step) and self._running_set.lasts(request)

    def _admit_last(self, request: Request, step: OpenStep) -> None:
        self._running_set.admit(request, step, len(self._running_set.running))

    def _is_ready(self, request: Request, step: OpenStep) -> bool:
        """Return whether others may be preempted for a waiting request.

        A request that was preempted in this step is not ready.
        """
        if request.beams is not None:
            return False  # a beam search waits, first in line, until all its rows have slots
        return not (request.num_pending or request in step.preempted or self._is_held(request))

    def _admit_instead_of(self, victims: list[Request], request: Request, step: OpenStep) -> None:
        """Preempt `victims` and admit `request`."""
        for victim in victims:
            # a victim may already be preempted, together with another row of its beam search
            if victim.status is Status.RUNNING:
                self._running_set.preempt(victim, step)
        for each in set(victims):
            each.num_bypasses += 1
        # Insert after the oldest running request, which thus always finishes. As the youngest,
        # `request` would be the first to be preempted when the KV cache is full.
        self._running_set.admit(request, step, seniority=1)

    def _candidates(self, step: OpenStep) -> Iterable[Request]:
        """Return the waiting requests to try, in order of preference."""
        waiting = self._waiting.first_queue
        if waiting.must_take_first or type(self._policy).order is Policy.order:
            return waiting.candidates()
        # Ordered once per step: looking up the cached pages of all requests takes longer than
        # admitting one.
        step.ordered = [each for each in step.ordered if each.status is Status.WAITING]
        if not step.ordered:
            num_cached = self._running_set.cache.num_cached
            step.ordered = list(self._policy.order(waiting.candidates(), num_cached))
        return step.ordered

    def _is_held(self, request: Request) -> bool:
        """Return True if a running request is about to compute the next page of `request`.

        `request` then waits for that page, unless a request has been passed over too often or was
        preempted.
        """
        if self._waiting.first_queue.must_take_first:
            return False
        cache, begun = self._running_set.cache, self._running_set.begun
        if cache.snapshots is None:
            begun = [each for each in begun if each.num_uncomputed > 1]
        return any(cache.will_share(request, each) for each in begun)


def _runs_nothing(client: str, running: Iterable[Request]) -> bool:
    return all(each.client != client for each in running)
