"""EngineStats: records work and duration of steps, for reports, ITL control and speculation."""

import logging
import math
from collections.abc import Callable
from typing import Any

from qserve.engine.pending.peer_kv import PeerKv
from qserve.engine.pending.remote_kv import RemoteKv
from qserve.engine.report import EngineReport
from qserve.engine.scheduling.plan import StepPlan, load_of
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.lora.adapter_table import AdapterTable

# The fields of EngineReport about a step, with their values if there was no step.
NO_STEP = {"num_step_tokens": 0, "num_preempted": 0, "queue_seconds": ()} | {
    "num_prefix_queries": 0,
    "num_prefix_hits": 0,
    "num_external_queries": 0,
    "num_external_hits": 0,
}

logger = logging.getLogger(__name__)


class EngineStats:
    """Statistics of one engine."""

    def __init__(
        self, scheduler: Scheduler, transfers: RemoteKv | PeerKv | None, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._remote_kv, self._clock = scheduler, transfers, clock
        self._last_result = 0.0  # time of the last step's tokens, by `clock`
        self._unreported: dict[str, Any] = NO_STEP  # fields of the last step, until reported

    def note_plan(self, plan: StepPlan) -> None:
        """Record a planned step."""
        self._unreported = self.facts_of(plan)
        for request in plan.preempted:
            logger.warning(
                "Preempted %s (KV cache full); %d tokens will be recomputed",
                request.request_id,
                request.num_known,
            )

    def facts_of(self, plan: StepPlan) -> dict[str, Any]:
        """Return the fields of EngineReport about a step."""
        now = self._clock()
        for request in plan.admitted:
            request.facts = request.facts._replace(queue_seconds=now - request.arrived)
        looked_up = self._scheduler.cache.take_counts()
        external = (0, 0) if self._remote_kv is None else self._remote_kv.take_counts()
        return {
            "num_step_tokens": plan.num_tokens,
            "num_preempted": len(plan.preempted),
            "num_prefix_queries": looked_up[0],
            "num_prefix_hits": looked_up[1],
            "num_external_queries": external[0],
            "num_external_hits": external[1],
            "queue_seconds": tuple(request.facts.queue_seconds for request in plan.admitted),
        }

    def note_result(self, plan: StepPlan, launched: float, *, has_waited: bool) -> None:
        """Record that a step's tokens have just arrived, and measure its duration.

        The step began when it was launched, or when the previous step ended, if that was later. The
        host does not wait for a step that samples nothing, so the end of such a step is unknown.
        """
        scheduler, now = self._scheduler, self._clock()
        seconds = now - max(launched, self._last_result)
        if scheduler.pace is not None and has_waited and seconds > 0:
            scheduler.pace.observe(load_of(plan.chunks), seconds)
        if plan.drafting is not None and has_waited and seconds > 0:
            scheduler.speculation.observe_step(plan, seconds)
        self._last_result = now if has_waited else math.inf

    def report(self, num_outside: int, adapters: AdapterTable | None) -> EngineReport:
        """Return the load of the engine, and its last step if not reported before.

        `num_outside`: number of requests that are not in the scheduler yet.
        """
        scheduler, pool = self._scheduler, self._scheduler.pool
        step, self._unreported = self._unreported, NO_STEP
        return EngineReport(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + num_outside,
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_pages_used=pool.num_pages - pool.num_free,
            num_pages=pool.num_pages,
            drafts=() if scheduler.speculation is None else scheduler.speculation.take_counts(),
            running_adapters=() if adapters is None else adapters.names_in_use(),
            waiting_adapters=() if adapters is None else adapters.names_waited_for(),
            **step,
        )
