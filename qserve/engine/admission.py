"""Admission: who of those that wait runs next, and for whom others give way. Knows no tokens.

Whose turn it is stands in waiting_queue.py. One who has nothing running, and waits because others
have all places or pages, gets some of theirs after PATIENCE steps. One whose next page a running
request is about to compute waits for that page.
"""

from collections.abc import Collection, Iterable

from qserve.engine.places import Places
from qserve.engine.policies import Policy
from qserve.engine.request import Flow, Request, Status
from qserve.engine.step_plan import OpenStep
from qserve.engine.victims import fair_victims, places_of
from qserve.engine.waiting_queue import MAX_BYPASSES

# Steps that a request waits before others give way: to compute one again is little beside them.
PATIENCE = 16


class Admission:
    """The way from one scheduler's queue to its places."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._waiting, self._policy = places.waiting, places.policy

    def make_place(self, step: OpenStep, num_steps: int) -> None:
        """Preempt running requests for one of a lower level, or for one who has nothing.

        The latter waits PATIENCE steps before; `num_steps`: there were so far. Each request gives
        way MAX_BYPASSES times at most.
        """
        places, running = self._places, self._places.running
        waiting = self._waiting.first_queue
        first = waiting.first()
        if first is None or step.most_admitted < 1:
            return
        if running and first.level < running[-1].level and self._is_ready(first, step):
            if places.has_place(first, step):
                return
            higher = [each for each in running if each.level > first.level]
            victims = places_of(higher, places.pool, first, MAX_BYPASSES)
            if victims is not None:
                self._admit_in_place_of(victims, first, step)
                return
        request, ahead = waiting.first_in_turn(), waiting.first_preempted
        if request is None or not self._is_ready(request, step):
            return
        victims = None
        if num_steps - request.num_steps_at_arrival > PATIENCE:
            if ahead is None:
                may_go = not places.has_place(request, step)  # else it is admitted without this
            else:
                may_go = ahead.num_bypasses < MAX_BYPASSES and ahead.flow != request.flow
            if may_go:
                has_place = places.has_place(request, step)
                victims = fair_victims(running, places.pool, request, has_place, MAX_BYPASSES)
        if victims is not None:
            if ahead is not None:
                ahead.num_bypasses += 1
            self._admit_in_place_of(victims, request, step)

    def admit_first(self, step: OpenStep) -> Request | None:
        """The next request that waits, running now, or None where there is no place for it."""
        if step.most_admitted < 1 or not len(self._waiting) or self._places.num_seats < 1:
            return None  # before anybody is asked for an order of all that wait
        for request in self._candidates(step):
            if self._is_held(request):
                continue
            if not self._places.has_place(request, step):
                return None
            self._admit_last(request, step)
            return request
        return None

    def admit_shorter(
        self, num_tokens: int, flows: Collection[Flow], step: OpenStep, *, or_oldest: bool
    ) -> Request | None:
        """One of fewer tokens, of none of some flows, running now; None: none may, or has place.

        `or_oldest`: or else the one that has been passed over too often.
        """
        if step.most_admitted < 1:
            return None
        waiting = self._waiting.first_queue
        request = waiting.first_shorter(num_tokens, other_than=flows)
        if request is None and or_oldest:
            request = waiting.passed_over(other_than=flows)
        if request is None or self._is_held(request) or not self._places.has_place(request, step):
            return None
        self._admit_last(request, step)
        return request

    def _admit_last(self, request: Request, step: OpenStep) -> None:
        self._places.admit(request, step, len(self._places.running))

    def _is_ready(self, request: Request, step: OpenStep) -> bool:
        """Whether others may give way to one that waits; not to one that was pushed out now."""
        if request.beams is not None:
            return False  # those behind it wait until there are places for all its rows
        return not (request.num_pending or request in step.preempted or self._is_held(request))

    def _admit_in_place_of(self, victims: list[Request], request: Request, step: OpenStep) -> None:
        """Preempt running requests, and let another run."""
        for victim in victims:
            if victim.status is Status.RUNNING:  # not with another row of its beam search
                self._places.preempt(victim, step)
        for each in set(victims):
            each.num_bypasses += 1
        # Behind the oldest, which then always comes to its end. As the youngest it would be the
        # first to give way when pages run out.
        self._places.admit(request, step, seniority=1)

    def _candidates(self, step: OpenStep) -> Iterable[Request]:
        """Whom to admit, the first choice first."""
        waiting = self._waiting.first_queue
        if waiting.must_take_first or type(self._policy).order is Policy.order:
            return waiting.candidates()
        # Once a step: to look for the cached pages of all takes longer than to admit one.
        step.ordered = [each for each in step.ordered if each.status is Status.WAITING]
        if not step.ordered:
            num_cached = self._places.cache.num_cached
            step.ordered = list(self._policy.order(waiting.candidates(), num_cached))
        return step.ordered

    def _is_held(self, request: Request) -> bool:
        """Whether a running request is about to compute the page that this one needs first.

        It waits for that page, unless it has been passed over too often or lost its own pages.
        """
        if self._waiting.first_queue.must_take_first:
            return False
        cache, begun = self._places.cache, self._places.begun
        if cache.snapshots is None:
            begun = [each for each in begun if each.num_uncomputed > 1]
        return any(cache.will_share(request, each) for each in begun)
