"""PromptChunks: which tokens of prompts a step computes. Knows budgets, no tensors.

Prompts that were begun go on, the oldest first; then waiting requests are admitted. A prompt that
would use up the budget leaves up to half of it to shorter ones.
"""

from collections import deque
from collections.abc import Collection
from operator import attrgetter

from qserve.engine.admission import Admission
from qserve.engine.places import Places
from qserve.engine.request import Request, Status
from qserve.engine.step_pace import StepPace
from qserve.engine.step_plan import Chunk, OpenStep, load_of
from qserve.speculation.speculation import Speculation


class PromptChunks:
    """Of one scheduler."""

    def __init__(
        self,
        places: Places,
        admission: Admission,
        *,
        window: int | None,
        pace: StepPace | None,
        speculation: Speculation | None,
    ) -> None:
        """`window`: keys that a query sees; `pace` limits prompts beside decodes."""
        self._places, self._admission = places, admission
        self._window, self._pace, self._speculation = window, pace, speculation

    def plan(self, step: OpenStep) -> None:
        """Spend what is left of the step's budget."""
        begun = [each for each in self._places.begun if each.status is Status.RUNNING]
        begun = deque(sorted(begun, key=attrgetter("num_steps_at_arrival")))
        self._limit(step, begun)
        while step.budget > 0:
            request = begun.popleft() if begun else self._admission.admit_first(step)
            if request is None:
                break
            if request.num_uncomputed > step.budget:
                for each in self._plan_shorter(request, begun, step):
                    begun.remove(each)  # one chunk of each request: this may not fill the budget
            self._take(request, min(request.num_uncomputed, step.budget), step)

    def _limit(self, step: OpenStep, begun: Collection[Request]) -> None:
        """Lower the budget to what lets the step end in time for those that decode in it."""
        if self._pace is None or step.budget <= 0:
            return
        first = begun[0] if begun else self._places.waiting.first_queue.first()
        if first is None:
            return
        load = load_of(step.chunks)
        step.budget = self._pace.max_prompt_tokens(load, first.num_computed, step.budget)

    def _plan_shorter(
        self, longest: Request, begun: Collection[Request], step: OpenStep
    ) -> list[Request]:
        """Give half of the budget to what is shorter than the oldest prompt that is not done.

        The oldest gets the other half at least, so it is not kept from its end. Returns those of
        `begun` that got tokens.
        """
        begun = sorted(begun, key=attrgetter("num_uncomputed"))
        share = step.budget // 2
        flows = {longest.flow, *(each.flow for each in begun)}
        shortest = (begun or [longest])[0].num_uncomputed
        while share > 0:
            request = self._admission.admit_shorter(shortest, flows, step, or_oldest=not begun)
            if request is None:
                break
            share -= self._take(request, min(request.num_uncomputed, share), step)
        served = []
        for request in begun:
            if share > 0 and (
                taken := self._take(request, min(request.num_uncomputed, share), step)
            ):
                share -= taken
                served.append(request)
        return served

    def _take(self, request: Request, count: int, step: OpenStep) -> int:
        """Add the next `count` tokens of a request to the step. Returns how many it got."""
        start = request.num_computed
        if request.follows_last and request.lacks_mask and start + count == request.num_tokens:
            count -= 1  # the last of them would sample
            if not count:
                return 0
        snapshots = self._places.cache.snapshots
        if snapshots is not None:
            count = snapshots.shorter(request, start, count)
        if self._window is not None:
            # A step in flight may still read these pages: who gets them writes after it.
            first_visible = max(0, start - self._window + 1)
            self._places.pool.give_back_(request.block_table, first_visible)
        num_sampled = int(start + count == request.num_tokens)
        request.num_computed += count
        request.num_pending += num_sampled
        if num_sampled and self._speculation is not None:
            # without them drafts at a page's end would be proposed without the keys before them
            self._speculation.take_pages_ahead(request, start + count, self._places.pool)
        step.chunks.append(Chunk(request, start, count, num_sampled))
        if snapshots is not None:
            snapshots.note(request, start + count)
        step.budget -= count
        # From here on: a layer writes all keys of a step before any of them is read.
        self._places.cache.publish(request)
        return count
