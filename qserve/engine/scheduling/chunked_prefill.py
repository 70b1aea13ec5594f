"""ChunkedPrefill: decides which prompt tokens a step computes.

Started prompts continue, oldest first; then waiting requests are admitted. A prompt that would use
the whole budget leaves up to half of it to shorter prompts.
"""

from collections import deque
from collections.abc import Collection
from operator import attrgetter

from qserve.engine.request import Request, Status
from qserve.engine.scheduling.admission import Admission
from qserve.engine.scheduling.encoder_budget import EncoderBudget
from qserve.engine.scheduling.itl_control import ItlControl
from qserve.engine.scheduling.plan import Chunk, OpenStep, load_of
from qserve.engine.scheduling.running_set import RunningSet
from qserve.engine.scheduling.speculation import Speculation

# Maximum number of prompt tokens whose log probabilities are computed in a step that also decodes.
# Each such row costs a product with the LM head and work on the host: 256 rows of the model docs-5m
# take 0.2 s on a CPU.
ROWS_BESIDE_DECODES = 256


class ChunkedPrefill:
    """Plans the prompt tokens of one scheduler's steps."""

    def __init__(
        self,
        running_set: RunningSet,
        admission: Admission,
        *,
        window: int | None,
        pace: ItlControl | None,
        speculation: Speculation | None,
        encoder: EncoderBudget | None,
    ) -> None:
        """`window`: number of keys that a query attends to; None: all.

        `pace`: limits the prompt tokens in steps that decode.
        """
        self._running_set, self._admission = running_set, admission
        self._window, self._pace, self._speculation = window, pace, speculation
        self._encoder = encoder

    def plan(self, step: OpenStep) -> None:
        """Spend the rest of the step's budget on prompts."""
        begun = [each for each in self._running_set.begun if each.status is Status.RUNNING]
        begun = deque(sorted(begun, key=attrgetter("num_steps_at_arrival")))
        self._limit(step, begun)
        if step.chunks:
            step.rows_left = ROWS_BESIDE_DECODES
        while step.budget > 0:
            was_begun = bool(begun)
            request = begun.popleft() if was_begun else self._admission.admit_first(step)
            if request is None:
                break
            if request.num_uncomputed > step.budget:
                for each in self._plan_shorter(request, begun, step):
                    # a request gets one chunk per step, so some budget may stay unused
                    begun.remove(each)
            taken = self._take(request, min(request.num_uncomputed, step.budget), step)
            if not (taken or was_begun or step.rows_left):
                break  # more such requests would hold slots without progress

    def _limit(self, step: OpenStep, begun: Collection[Request]) -> None:
        """Lower the budget so that the step meets the inter-token latency target of its decodes."""
        if self._pace is None or step.budget <= 0:
            return
        first = begun[0] if begun else self._running_set.waiting.first_queue.first()
        if first is None:
            return
        load = load_of(step.chunks)
        step.budget = self._pace.max_prompt_tokens(load, first.num_computed, step.budget)

    def _plan_shorter(
        self, longest: Request, begun: Collection[Request], step: OpenStep
    ) -> list[Request]:
        """Spend up to half of the budget on requests shorter than the oldest unfinished prompt.

        The oldest prompt keeps at least the other half, so it is not starved. Returns the requests
        of `begun` that got tokens.
        """
        begun = sorted(begun, key=attrgetter("num_uncomputed"))
        remaining = step.budget // 2
        flows = {longest.flow, *(each.flow for each in begun)}
        shortest = (begun or [longest])[0].num_uncomputed
        while remaining > 0:
            request = self._admission.admit_shorter(shortest, flows, step, or_oldest=not begun)
            if request is None:
                break
            taken = self._take(request, min(request.num_uncomputed, remaining), step)
            remaining -= taken
            if not taken:
                break
        served = []
        for request in begun:
            if remaining > 0 and (
                taken := self._take(request, min(request.num_uncomputed, remaining), step)
            ):
                remaining -= taken
                served.append(request)
        return served

    def _take(self, request: Request, count: int, step: OpenStep) -> int:
        """Add up to `count` next tokens of a request to the step. Returns the number added."""
        start = request.num_computed
        if request.prompt_logprobs is not None:
            count = min(count, step.rows_left)
            step.rows_left -= count
            if not count:
                return 0
        if request.follows_last and request.lacks_mask and start + count == request.num_tokens:
            count -= 1  # the last token's row would sample, and its mask is not ready
            if not count:
                return 0
        if request.output_window:
            # Tokens whose keys replace others are computed one by one, after a preemption, too.
            room = request.num_prompt_tokens + request.output_window - start
            count = min(count, max(1, room))
        snapshots = self._running_set.cache.snapshots
        if snapshots is not None:
            count = snapshots.shorter(request, start, count)
        if self._encoder is not None:
            count = self._encoder.take(request, start, count)
            if not count:
                return 0
        if self._window is not None:
            # An in-flight step may still read these pages; their next owner writes after that step.
            first_visible = max(0, start - self._window + 1)
            self._running_set.pool.release_before_(request.block_table, first_visible)
        num_sampled = int(start + count == request.num_tokens)
        request.num_computed += count
        request.num_pending += num_sampled
        if num_sampled and self._speculation is not None:
            # Without these pages, drafts beyond a page's end would lack the keys before them.
            self._speculation.take_pages_ahead(request, start + count, self._running_set.pool)
        step.chunks.append(Chunk(request, start, count, num_sampled))
        if snapshots is not None:
            snapshots.note(request, start + count)
        step.budget -= count
        # The pages count as valid from here on: a layer writes all keys of a step before it reads.
        self._running_set.cache.insert(request)
        return count
