"""Engine: takes requests with token ids, runs steps and returns events.

`Engine.step()` names every stage in order. On a GPU one step stays in flight while the next is
planned, so that the GPU never waits for Python; a sampled token reaches the host one step late.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.build import EngineParts
from qserve.engine.control.commands import ABORT, KEEP
from qserve.engine.control.operations import Operations
from qserve.engine.distributed.executors import WaitingRanks
from qserve.engine.in_flight import InFlightSteps, StepRanges
from qserve.engine.input_processor import InputProcessor
from qserve.engine.media_limits import longest_item
from qserve.engine.pending.pending import Pause, check_mode
from qserve.engine.report import EngineReport
from qserve.engine.request import Deadlines, Request, Status
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.stats import EngineStats
from qserve.engine.step.mask_jobs import MaskJobs
from qserve.engine.step.step_input import StepInput
from qserve.engine.token_event import TokenEvent
from qserve.engine.uninterrupted import uninterrupted
from qserve.multimodal.media import MediaItem
from qserve.params.request_options import DEFAULT, RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.profile.control import ProfileControl
from qserve.profile.recorder import Recorder

# An idle engine checks at this interval whether an engine that shares its experts waits for it.
CALL_SECONDS = 0.005
DEADLINE_SECONDS = 0.1  # interval of deadline checks while generation is paused


class Engine:
    """A model, its scheduler and its workers."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: WaitingRanks | None = None,
        *,
        steps_in_flight: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load the model. Raises InputError.

        `ranks`: processes of the other ranks, if they are already running. `steps_in_flight`: by
        default 1 on a GPU with --async-scheduling, else 0; on a CPU `launch` itself computes.
        """
        parts = EngineParts.start(config, ranks)
        self.config, self._clock = config, clock
        self.model_config, self.max_model_len = parts.model, parts.max_model_len
        self.workers, self.scheduler = parts.workers, parts.scheduler
        self.adapters = parts.adapters
        self._remote_kv, self._pending = parts.transfers, parts.pending
        speculates = self.scheduler.speculation is not None
        self._input_processor = InputProcessor(
            self.model_config,
            self.max_model_len,
            self.adapters,
            num_positions=parts.num_positions,
            seed=config.seed,
            speculates=speculates,
            longest_item=longest_item(config),
        )
        self._requests: dict[str, Request] = {}
        self._pause = Pause()
        self._ended: list[TokenEvent] = []  # last events of ended requests, for the next step
        self.operations = Operations(config, self.model_config, self.workers)
        # The mask of a row waits for the row's previous token in three cases. Masks depend on
        # drafts. All ranks sample, so masks are part of the launch. The model has recurrent states,
        # and a row whose mask is late would apply its token to the state twice.
        several, states = self.workers.num_ranks > 1, self.runner.has_states
        self._masks = MaskJobs(waits=speculates or several or states)
        self._deadlines = Deadlines()
        self._stats = EngineStats(self.scheduler, self._remote_kv, clock)
        self._in_flight = InFlightSteps(
            self.workers,
            self.scheduler,
            self._masks,
            self._stats,
            max_num_seqs=config.max_num_seqs,
            pools_by_rows=config.batch_invariant,
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
        """Names of steps in a profile."""
        return self._in_flight.ranges

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    def has_work(self) -> bool:
        if self._ended or self.workers.is_wanted:
            return True
        return not self._pause.stops_steps and self._has_requests

    @property
    def _has_requests(self) -> bool:
        """True if requests run or wait, not counting requests held by a pause."""
        return bool(self._in_flight or self.scheduler.num_requests) or self._pending.has_work

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrived: float | None = None,
        *,
        client: str = "",
        group: str = "",
        options: RequestOptions = DEFAULT,
    ) -> None:
        """Queue a request. Raises InputError if it is empty, too long, or can never run.

        `arrived`: time.perf_counter() when the request was sent; all processes share this clock.
        Clients take turns, and so do the groups of one client. A group is all outputs of one API
        request.
        """
        if request_id in self._requests:
            raise InputError(
                f"request {request_id}", "is running already", "give each request its own id"
            )
        if options.is_for_another and self._pause.is_on:
            raise InputError(  # otherwise the decoding engine would wait until the pause ends
                "the engine that computes prompts", "is paused or asleep", "resume it"
            )
        request = self._input_processor.make(
            request_id,
            prompt_token_ids,
            params,
            options,
            arrived=self._clock() if arrived is None else arrived,
            client=client,
            group=group,
        )
        if self._pause.is_on:
            self.scheduler.check(request)
            self._pause.hold(request)
        else:
            self._pending.add(request)
        self._requests[request_id] = request
        self._masks.add(request)
        self._in_flight.add(request)
        if options.timeout is not None:
            self._deadlines.add(request, options.timeout)

    def abort(self, request_id: str) -> None:
        """Drop a request without a last event, and free its pages. An unknown id is ignored."""
        request = self._forget(request_id)
        if request is not None:
            self._drop(request)

    def stop_waiting(self, request_id: str) -> None:
        """Stop waiting for KV pages of a request: the other engine has finished or failed."""
        self._pending.stop_waiting(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            request.awaits_pages = False

    @uninterrupted()
    def step(self) -> list[TokenEvent]:
        """Plan and launch one step, then apply the results of older steps. Returns the events."""
        events, self._ended = self._ended, []
        events += [self._miss(request) for request in self._deadlines.missed(self._clock())]
        if self._pause.stops_steps:
            if self.workers.is_wanted:
                self.workers.compute_for_others()
            self._forget_finished(events)
            return events
        events += self._pending.admit(
            is_idle=not self._in_flight and not self.scheduler.num_requests
        )
        if events:
            self.workers.check()  # if a read failed because its rank died, the engine has failed
        self._masks.prepare()
        plan = self.scheduler.schedule()
        self._stats.note_plan(plan)
        if plan.chunks:
            if self._remote_kv is not None:
                self._remote_kv.before_launch(plan)
            events += self._in_flight.launch(plan)
        elif self.workers.is_wanted:
            self.workers.compute_for_others()
        events += self._in_flight.take(self._max_in_flight if plan.chunks else 0)
        if not plan.chunks and not events:
            self._masks.wait_a_little()
        if self.profiler.is_armed:
            self.profiler.after_step()
        if self._remote_kv is not None:
            events = self._remote_kv.after_step(events)
        self._forget_finished(events)
        return events

    def pause(self, mode: str = ABORT) -> None:
        """Pause generation. `mode`: see MODES in commands.py. Later requests wait for `resume`.

        The next step returns the last events of aborted requests. Raises InputError.
        """
        check_mode(mode)
        if mode == ABORT:
            self.abort_all(held=False)
        elif mode == KEEP:
            self._settle()
        self._pause.mode = mode

    def resume(self) -> None:
        """Resume generation: stopped requests first, then held ones. Raises InputError."""
        self.operations.check_awake()
        for request in self._pause.end():
            try:
                self._pending.add(request)
            except InputError as error:
                self._forget(request.request_id)
                self._ended.append(TokenEvent.refusal(request.request_id, str(error)))

    @property
    def is_paused(self) -> bool:
        return self._pause.is_on

    @property
    def is_drained(self) -> bool:
        """True if the pause is complete: no step is in flight and none will follow."""
        if not self._pause.is_on:
            return False
        return not self._in_flight and (self._pause.stops_steps or not self._has_requests)

    @property
    def idle_seconds(self) -> float | None:
        """Longest wait for a message before the next `step` of an idle engine; None: no limit."""
        if self.config.shares_experts:
            return CALL_SECONDS
        return DEADLINE_SECONDS if self._pause.is_on and len(self._deadlines) else None

    def abort_all(self, *, held: bool = True) -> int:
        """End all requests with the finish reason "abort". `held`: also requests held by a pause.

        Returns the number of ended requests. The next step returns their last events.
        """
        self._settle()
        ended = 0
        for request in list(self._requests.values()):
            if self._pause.drop(request):
                if not held:
                    self._pause.hold(request)
                    continue
                request.status = Status.FINISHED
            else:
                self._drop(request)
            self._forget(request.request_id)
            self._ended.append(request.aborted())
            ended += 1
        return ended

    def recompute_all(self) -> None:
        """Preempt all running requests and empty the prefix cache, so all tokens are recomputed."""
        self._settle()
        if self._remote_kv is not None:
            self._remote_kv.end_fetches()
        self.scheduler.preempt_all()
        self.reset_prefix_cache()

    def _settle(self) -> None:
        """Wait for in-flight steps. The next `step` returns their events."""
        if self._in_flight:
            events = self._in_flight.take(0)
            if self._remote_kv is not None:
                events = self._remote_kv.after_step(events)
            self._forget_finished(events)
            self._ended += events

    def _forget_finished(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self._forget(event.request_id)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests continue."""
        self.scheduler.reset_prefix_cache()

    def use_idle_time(self) -> bool:
        """Do up to 0.05 s of deferred startup work. Returns False if none is left."""
        return not self.operations.is_sleeping and self.workers.capture_next()

    def watch_ranks(self, on_death: Callable[[Exception], None]) -> None:
        """Call `on_death` from another thread if a rank died and no call raised the error."""
        self.workers.watch(on_death)

    def close(self) -> None:
        """End the processes of the other ranks. The engine cannot be used afterwards."""
        self._pending.close()
        self.workers.close()

    def report(self) -> EngineReport:
        """Return the engine's state, and the last step unless an earlier report has included it."""
        report = self._stats.report(self._pending.num_waiting + len(self._pause), self.adapters)
        if not self._pause.is_on:
            return report
        return replace(report, is_paused=True, is_sleeping=self.operations.is_sleeping)

    def logits(self, token_ids: list[int], media: Sequence[MediaItem] = ()) -> torch.Tensor:
        """Return float32 logits [S, V] after each of S tokens. The engine must be idle.

        `media`: images and videos in the sequence. Raises InputError.
        """
        if self.has_work():
            raise RuntimeError("Engine.logits needs an idle engine")
        self.operations.check_awake()
        pool, page_size = self.scheduler.pool, self.config.block_size
        longest = min(self.max_model_len, pool.num_free * page_size)
        if not 0 < len(token_ids) <= longest:
            raise InputError(
                "sequence",
                f"expected 1 to {longest} tokens, found {len(token_ids)}",
                "give a shorter text, or raise --max-model-len",
            )
        self._input_processor.check_tokens("sequence", token_ids)
        self._input_processor.check_media("sequence", media, len(token_ids))
        pages: list[int] = []
        pool.grow_(pages, len(token_ids))
        moves = pool.take_moves()  # these pages' old contents are first copied to the host
        try:
            step = StepInput.of_sequence(
                token_ids,
                pages,
                page_size=page_size,
                params=SamplingParams(),
                media=tuple(media),
                axes=self._input_processor.axes,
                is_media_N=self._input_processor.media_tokens(token_ids),
            )
            return self.workers.logits(replace(step, page_moves=moves))
        except BaseException:
            if moves is not None:
                pool.invalidate_moves(moves)
            raise
        finally:
            pool.release_(pages)

    def _forget(self, request_id: str) -> Request | None:
        self._in_flight.forget(request_id)
        self._masks.forget(request_id)
        return self._requests.pop(request_id, None)

    def _miss(self, request: Request) -> TokenEvent:
        self._drop(request)
        num_tokens = request.num_known - request.num_prompt_tokens
        reason = f"deadline exceeded after {num_tokens} tokens"
        return TokenEvent.failure(request.request_id, reason)

    def _drop(self, request: Request) -> None:
        """End a request, whether it is held, pending, waiting or running."""
        if self._pause.drop(request) or self._pending.remove(request):
            request.status = Status.FINISHED
        else:
            self.scheduler.finish(request)
