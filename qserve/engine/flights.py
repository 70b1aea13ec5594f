"""Flights: the steps on the device, from their launch until their tokens are taken.

Knows the workers and what a step tells beside tokens; of the scheduler that it takes tokens.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from qserve.engine.mask_jobs import MaskJobs
from qserve.engine.model_runner import StepHandle
from qserve.engine.out_of_memory import ran_out
from qserve.engine.pooling import PoolPlan, plan_pool_rows
from qserve.engine.prompt_logprobs import PromptPlan, plan_prompt_rows
from qserve.engine.request import Request, RequestEvent
from qserve.engine.request_rows import RequestRows
from qserve.engine.scheduler import Scheduler
from qserve.engine.step_input import StepInput
from qserve.engine.step_meter import StepMeter
from qserve.engine.step_plan import StepPlan
from qserve.engine.step_ranges import StepRanges
from qserve.engine.workers import WorkerGroup

logger = logging.getLogger(__name__)


class Flight(NamedTuple):
    """A step on the device."""

    plan: StepPlan
    prompts: PromptPlan | None  # whose log probabilities it tells
    pools: PoolPlan | None  # of whose prompts it makes vectors
    handle: StepHandle
    launched: float


class Flights:
    """Those of one engine, the oldest first."""

    def __init__(
        self,
        workers: WorkerGroup,
        scheduler: Scheduler,
        masks: MaskJobs,
        meter: StepMeter,
        *,
        max_num_seqs: int,
        clock: Callable[[], float],
    ) -> None:
        self.workers, self._scheduler = workers, scheduler
        self._masks, self._meter, self._clock = masks, meter, clock
        self.ranges = StepRanges()
        self._rows = RequestRows(max_num_seqs)
        self._telling: set[str] = set()  # of these, who asks what steps tell of prompts
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def add(self, request: Request) -> None:
        """Be ready for the steps of a new request."""
        if request.prompt_logprobs is not None or request.pooled is not None:
            self._telling.add(request.request_id)

    def forget(self, request_id: str) -> None:
        self._telling.discard(request_id)

    def launch(self, plan: StepPlan) -> list[RequestEvent]:
        """Start a step that is not empty. Returns the events of steps that had to end before."""
        step = StepInput.build(
            plan,
            page_size=self._scheduler.pool.page_size,
            rows=self._rows,
            is_split=not self._masks.waits,
        )
        prompts = pools = None
        if self._telling:
            prompts, pools = plan_prompt_rows(plan), plan_pool_rows(plan)
        if prompts is not None:
            step = replace(step, prompt_rows=prompts.rows)
        if pools is not None:
            step = replace(step, pool_rows=pools.rows)
        events: list[RequestEvent] = []
        launched = self._clock()
        try:
            if step.awaits_masks:
                # The device computes while the host reads the tokens that the masks follow.
                self._masks.begin(plan)
                with self.ranges.around(plan):
                    self.workers.launch_forward(step)
                events += self.take(0)
                late = self._masks.late(plan, self.workers.is_computing)
                step = step.with_masks(plan, self._rows, late)
                handle = self.workers.launch_sampling(step)
                plan = plan.leave_out_(late) if late else plan
            else:
                with self.ranges.around(plan):
                    handle = self.workers.launch(step)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            # What is in flight first: it may hold tokens of the same requests, and end them. Of
            # their pages nobody is to find what this step would have computed.
            self._scheduler.keep_private(plan)
            return events + self.take(0) + self._fail(plan, error)
        self._flights.append(Flight(plan, prompts, pools, handle, launched))
        return events

    def take(self, num_left: int) -> list[RequestEvent]:
        """Wait for the oldest, and take their tokens, but for the last `num_left`."""
        events: list[RequestEvent] = []
        while len(self._flights) > num_left:
            plan, prompts, pools, handle, launched = self._flights.popleft()
            if prompts is not None:
                handle.prompts.give_to(prompts)
            if pools is not None:
                handle.pools.give_to(pools)
            sampled, logprobs = handle.result(), handle.logprobs()
            self.workers.check()  # where a rank was missing, these tokens mean nothing
            self._meter.note_result(plan, launched, has_waited=bool(sampled))
            emitted = None
            if plan.drafting is not None:
                emitted, drafts = handle.num_emitted(), handle.proposed()
                if drafts is not None:
                    self._scheduler.speculation.take_drafts(plan.chunks, drafts)
            events += self._scheduler.update(plan, sampled, logprobs, emitted)
        return events

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestEvent]:
        """End the requests of a step that the device had no memory for. The others go on."""
        self.workers.free_unused()
        reason = (
            f"the device ran out of memory in a step of {plan.num_tokens} tokens; lower"
            " --max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization"
        )
        logger.error("%s: %s", reason, str(error).partition("\n")[0])
        return self._scheduler.fail_step(plan, reason)
