"""InFlightSteps: launched steps whose tokens are not read yet.

StepRanges names the steps in a profile.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from qserve.engine.distributed.worker_group import WorkerGroup
from qserve.engine.request import Request
from qserve.engine.runner.out_of_memory import ran_out
from qserve.engine.runner.pooling import PoolPlan, plan_pool_rows
from qserve.engine.runner.prompt_logprobs import PromptPlan, plan_prompt_rows
from qserve.engine.runner.step_handle import StepHandle
from qserve.engine.scheduling.plan import StepPlan
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.engine.stats import EngineStats
from qserve.engine.step.mask_jobs import MaskJobs
from qserve.engine.step.request_rows import RequestRows
from qserve.engine.step.step_input import StepInput
from qserve.engine.token_event import TokenEvent

logger = logging.getLogger(__name__)


class InFlightStep(NamedTuple):
    """A launched step whose results are not read yet."""

    plan: StepPlan
    prompts: PromptPlan | None  # requests for which the step computes prompt log probabilities
    pools: PoolPlan | None  # requests for which the step pools the prompt
    handle: StepHandle
    launched: float  # time of the launch, by the engine's clock


class InFlightSteps:
    """The in-flight steps of one engine, oldest first."""

    def __init__(
        self,
        workers: WorkerGroup,
        scheduler: Scheduler,
        masks: MaskJobs,
        meter: EngineStats,
        *,
        max_num_seqs: int,
        pools_by_rows: bool,
        clock: Callable[[], float],
    ) -> None:
        """`pools_by_rows`: mean pooling adds the rows of a prompt one by one."""
        self.workers, self._scheduler = workers, scheduler
        self._masks, self._stats, self._clock = masks, meter, clock
        self.ranges = StepRanges()
        self._rows, self._pools_by_rows = RequestRows(max_num_seqs), pools_by_rows
        self._reporting: set[str] = set()  # requests with prompt log probabilities or pooling
        self._in_flight: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._in_flight)

    def add(self, request: Request) -> None:
        """Add a new request."""
        if request.prompt_logprobs is not None or request.pooled is not None:
            self._reporting.add(request.request_id)

    def forget(self, request_id: str) -> None:
        self._reporting.discard(request_id)

    def launch(self, plan: StepPlan) -> list[TokenEvent]:
        """Launch a non-empty step. Returns the events of steps that had to finish before it."""
        step = StepInput.build(
            plan,
            page_size=self._scheduler.pool.page_size,
            rows=self._rows,
            is_split=not self._masks.waits,
        )
        prompts = pools = None
        if self._reporting:
            prompts = plan_prompt_rows(plan)
            pools = plan_pool_rows(plan, by_rows=self._pools_by_rows)
        if prompts is not None:
            step = replace(step, prompt_rows=prompts.rows)
        if pools is not None:
            step = replace(step, pool_rows=pools.rows)
        events: list[TokenEvent] = []
        launched = self._clock()
        try:
            if step.awaits_masks:
                # The device computes while the host reads the tokens that the masks depend on.
                self._masks.begin(plan)
                with self.ranges.around(plan):
                    self.workers.launch_forward(step)
                events += self.take(0)
                late = self._masks.late(plan, self.workers.is_computing)
                step = step.with_masks(plan, self._rows, late)
                handle = self.workers.launch_sampling(step)
                plan = plan.drop_late_samples_(late) if late else plan
            else:
                with self.ranges.around(plan):
                    handle = self.workers.launch(step)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) or self.workers.shares_experts:
                raise  # other engines are in the same step
            # The failed step's pages must not enter the prefix cache. Older in-flight steps are
            # applied first: they may hold tokens of the same requests, and may end them.
            self._scheduler.keep_private(plan)
            return events + self.take(0) + self._fail(plan, error)
        self._in_flight.append(InFlightStep(plan, prompts, pools, handle, launched))
        return events

    def take(self, num_left: int) -> list[TokenEvent]:
        """Wait for the oldest steps and apply their tokens until `num_left` are in flight."""
        events: list[TokenEvent] = []
        while len(self._in_flight) > num_left:
            plan, prompts, pools, handle, launched = self._in_flight.popleft()
            if prompts is not None:
                handle.prompts.give_to(prompts)
            if pools is not None:
                handle.pools.give_to(pools)
            sampled, logprobs = handle.result(), handle.logprobs()
            self.workers.check()  # if a rank is dead, these tokens are meaningless
            self._stats.note_result(plan, launched, has_waited=bool(sampled))
            emitted = None
            if plan.drafting is not None:
                emitted, drafts = handle.num_emitted(), handle.proposed()
                if drafts is not None:
                    self._scheduler.speculation.take_drafts(plan.chunks, drafts)
            events += self._scheduler.update(plan, sampled, logprobs, emitted)
        return events

    def _fail(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """End the requests of a step that ran out of device memory. Other requests continue."""
        self.workers.free_unused()
        reason = (
            f"the device ran out of memory in a step of {plan.num_tokens} tokens; lower"
            " --max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization"
        )
        logger.error("%s: %s", reason, str(error).partition("\n")[0])
        return self._scheduler.fail_step(plan, reason)


_NOTHING = nullcontext()


class StepRanges:
    """Named profiler ranges. Unless `recording` is set, a step costs one comparison."""

    def __init__(self) -> None:
        self.recording = False
        self.num_steps = 0  # since recording began

    def around(self, plan: StepPlan) -> AbstractContextManager:
        """Return the range for the launch of a step. The name describes the step's work."""
        if not self.recording:
            return _NOTHING
        decodes = sum([chunk.count == chunk.num_sampled for chunk in plan.chunks])
        prompts = sum([chunk.count for chunk in plan.chunks if chunk.count > chunk.num_sampled])
        return self.named(f"decode={decodes} chunk={prompts}")

    def named(self, what: str) -> AbstractContextManager:
        """Return the range of the next step, named after `what`."""
        name = f"step {self.num_steps} {what}"
        self.num_steps += 1
        return torch.profiler.record_function(name)
