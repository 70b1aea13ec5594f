"""The engine: requests in, events out, one step after another. Knows no text and no HTTP.

`Engine.step()` is its table of contents. On a GPU one step stays in flight while the next is
planned, so that the GPU never waits for Python; a sampled token reaches the host one step late.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.deadlines import Deadlines
from qserve.engine.engine_parts import EngineParts
from qserve.engine.flights import Flights
from qserve.engine.mask_jobs import MaskJobs
from qserve.engine.model_runner import ModelRunner
from qserve.engine.report import EngineReport
from qserve.engine.request import Request, RequestEvent, Status
from qserve.engine.request_maker import RequestMaker
from qserve.engine.step_input import StepInput
from qserve.engine.step_meter import StepMeter
from qserve.engine.step_ranges import StepRanges
from qserve.handling import DEFAULT, Handling
from qserve.profile.control import ProfileControl
from qserve.profile.recorder import Recorder
from qserve.sampling_params import SamplingParams


class Engine:
    """A model, its scheduler and its workers."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        steps_in_flight: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load the model. Raises InputError.

        `steps_in_flight` is 1 on a GPU unless given; on a CPU, which computes in `launch`, 0.
        """
        parts = EngineParts.start(config)
        self.config, self._clock = config, clock
        self.model_config, self.max_model_len = parts.model, parts.max_model_len
        self.workers, self.scheduler = parts.workers, parts.scheduler
        self.adapters = parts.adapters
        self._transfers, self._entrance = parts.transfers, parts.entrance
        speculates = self.scheduler.speculation is not None
        self._maker = RequestMaker(
            self.model_config,
            self.max_model_len,
            self.adapters,
            seed=config.seed,
            speculates=speculates,
        )
        self._requests: dict[str, Request] = {}
        # Masks follow drafts, every rank samples, and states take no token twice as late rows do:
        # then rows wait for the token before.
        several, states = self.workers.num_ranks > 1, self.model_config.has_states
        self._masks = MaskJobs(waits=speculates or several or states)
        self._deadlines = Deadlines()
        self._meter = StepMeter(self.scheduler, self._transfers, clock)
        self._flights = Flights(
            self.workers,
            self.scheduler,
            self._masks,
            self._meter,
            max_num_seqs=config.max_num_seqs,
            clock=clock,
        )
        self.profiler = ProfileControl(Recorder(self.runner, self.step_ranges))
        self._max_in_flight = steps_in_flight
        if steps_in_flight is None:
            ahead = config.async_scheduling and not self.workers.computes_in_launch
            self._max_in_flight = int(ahead)

    @property
    def runner(self) -> ModelRunner:
        return self.workers.runner

    @property
    def step_ranges(self) -> StepRanges:
        """What steps are called in a profile."""
        return self._flights.ranges

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    def has_work(self) -> bool:
        return bool(self._flights or self.scheduler.num_requests) or self._entrance.has_work

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrived: float | None = None,
        *,
        client: str = "",
        group: str = "",
        handling: Handling = DEFAULT,
    ) -> None:
        """Queue a request. Raises InputError where it is empty, too long, or can never run.

        `arrived` is when it was sent, by time.perf_counter(), which all processes share. Clients
        take turns, and so do the groups of each: a group is all outputs of one API request.
        """
        if request_id in self._requests:
            raise InputError(
                f"request {request_id}", "is running already", "give each request its own id"
            )
        request = self._maker.make(
            request_id,
            prompt_token_ids,
            params,
            handling,
            arrived=self._clock() if arrived is None else arrived,
            client=client,
            group=group,
        )
        self._entrance.add(request)
        self._requests[request_id] = request
        self._masks.add(request)
        self._flights.add(request)
        if handling.timeout is not None:
            self._deadlines.add(request, handling.timeout)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages; it emits nothing more. An unknown id is ignored."""
        request = self._forget(request_id)
        if request is not None:
            self._drop(request)

    def step(self) -> list[RequestEvent]:
        """Plan and launch a step, then take the results that are due. Returns their events."""
        events = [self._miss(request) for request in self._deadlines.missed(self._clock())]
        events += self._entrance.admit(
            is_idle=not self._flights and not self.scheduler.num_requests
        )
        self._masks.prepare()
        plan = self.scheduler.schedule()
        self._meter.note_plan(plan)
        if plan.chunks:
            events += self._flights.launch(plan)
        events += self._flights.take(self._max_in_flight if plan.chunks else 0)
        if not plan.chunks and not events:
            self._masks.wait_a_little()
        if self.profiler.is_armed:
            self.profiler.after_step()
        events = self._transfers.after_step(events)
        for event in events:
            if event.finish_reason is not None:
                self._forget(event.request_id)
        return events

    def reset_prefix_cache(self) -> None:
        """Forget what KV pages hold: requests that come find none. Running ones go on."""
        self.scheduler.reset_prefix_cache()

    def use_idle_time(self) -> bool:
        """Do a piece of work, of 0.1 s at most, that a start left. Returns False where none is."""
        return self.workers.capture_next()

    def watch_ranks(self, on_death: Callable[[Exception], None]) -> None:
        """Call `on_death`, from another thread, when a rank of the model died unnoticed."""
        self.workers.watch(on_death)

    def close(self) -> None:
        """End the ranks of a model that is shared out. The engine can do nothing after it."""
        self.workers.close()

    def report(self) -> EngineReport:
        """What the engine holds now, and what the last step did, unless that was told before."""
        return self._meter.report(self._entrance.num_waiting, self.adapters)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits [S, V], float32, after each of S tokens, on an idle engine. Raises InputError."""
        if self.has_work():
            raise RuntimeError("Engine.logits needs an idle engine")
        pool, page_size = self.scheduler.pool, self.config.block_size
        longest = min(self.max_model_len, pool.num_free * page_size)
        if not 0 < len(token_ids) <= longest:
            raise InputError("sequence", f"expected 1 to {longest} tokens, found {len(token_ids)}")
        pages: list[int] = []
        pool.grow_(pages, len(token_ids))
        moves = pool.take_moves()  # what those pages held goes to the host first
        try:
            step = StepInput.of_sequence(
                token_ids, pages, page_size=page_size, params=SamplingParams()
            )
            return self.workers.logits(replace(step, page_moves=moves))
        except BaseException:
            if moves is not None:
                pool.doubt(moves)
            raise
        finally:
            pool.release_(pages)

    def _forget(self, request_id: str) -> Request | None:
        self._flights.forget(request_id)
        self._masks.forget(request_id)
        return self._requests.pop(request_id, None)

    def _miss(self, request: Request) -> RequestEvent:
        self._drop(request)
        num_tokens = request.num_known - request.num_prompt_tokens
        reason = f"its time is up after {num_tokens} tokens"
        return RequestEvent.failure(request.request_id, reason)

    def _drop(self, request: Request) -> None:
        """End a request, wherever it is."""
        if self._entrance.remove(request):
            request.status = Status.FINISHED
        else:
            self.scheduler.finish(request)
