"""The engine: requests in, events out, one step after another. Knows no text and no HTTP.

`Engine.step()` is its table of contents. On a GPU one step stays in flight while the next is
planned, so that the GPU never waits for Python; a sampled token reaches the host one step late.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.beams import BeamGroup
from qserve.engine.constrained import Constrained
from qserve.engine.deadlines import Deadlines
from qserve.engine.entrance import Entrance
from qserve.engine.host_pages import HostPages
from qserve.engine.kv_pages import PagePool
from qserve.engine.mask_jobs import MaskJobs
from qserve.engine.masks import token_filter
from qserve.engine.memory import GIB
from qserve.engine.model_runner import ModelRunner, StepHandle
from qserve.engine.page_transfers import PageTransfers, num_slots
from qserve.engine.policies import make_policy
from qserve.engine.pooled import Pooled
from qserve.engine.pooling import NO_HEAD, PoolPlan, check_pooling, plan_pool_rows
from qserve.engine.prompt_logprobs import PromptPlan, plan_prompt_rows
from qserve.engine.report import EngineReport
from qserve.engine.request import Request, RequestEvent, Status
from qserve.engine.request_rows import RequestRows
from qserve.engine.scheduler import Scheduler
from qserve.engine.sizes import largest_step, pick_length
from qserve.engine.step_input import StepInput
from qserve.engine.step_pace import StepPace
from qserve.engine.step_plan import StepPlan, load_of
from qserve.engine.step_ranges import StepRanges
from qserve.engine.workers import WorkerGroup
from qserve.handling import DEFAULT, Handling
from qserve.lora.adapter_table import adapters_of, make_table
from qserve.model.model_config import ModelConfig
from qserve.pooling_params import KINDS_OF_LAST_ROW
from qserve.profile.control import ProfileControl
from qserve.profile.recorder import Recorder
from qserve.sampling_params import SamplingParams
from qserve.speculation.speculation import make_speculation

# The fields of EngineReport that tell of a step, and their values where there was none.
NO_STEP = {"num_step_tokens": 0, "num_preempted": 0, "queue_seconds": ()} | {
    "num_prefix_queries": 0,
    "num_prefix_hits": 0,
    "num_external_queries": 0,
    "num_external_hits": 0,
}

logger = logging.getLogger(__name__)


class _Flight(NamedTuple):
    """A step on the device."""

    plan: StepPlan
    prompts: PromptPlan | None  # whose log probabilities it tells
    pools: PoolPlan | None  # of whose prompts it makes vectors
    handle: StepHandle
    launched: float


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
        try:
            self._start(config, steps_in_flight, clock)
        except BaseException:
            if "workers" in vars(self):
                self.close()  # or ranks would stay for as long as somebody holds the error
            raise

    def _start(
        self, config: EngineConfig, steps_in_flight: int | None, clock: Callable[[], float]
    ) -> None:
        self.config = config
        # Before the model: a name that is mistyped should not show only after a long load.
        policy = make_policy(config.scheduling_policy, prefill_batch_size=config.prefill_batch_size)
        self.model_config = ModelConfig.from_folder(config.model)
        self.max_model_len = pick_length(config, self.model_config)
        self.model_config.check_length(self.max_model_len)
        self.workers = WorkerGroup(config, self.model_config, self.max_model_len)
        largest = largest_step(config, self.max_model_len, self.runner.drafting)
        self.workers.compile_kernels(largest)
        num_pages = self._pick_num_pages(largest)
        max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        longest_step = min(
            self.max_model_len, config.max_num_batched_tokens, num_pages * config.block_size
        )
        logger.info(
            "KV cache: %d tokens in %d pages, %.2f GiB (%s)",
            num_pages * config.block_size,
            num_pages,
            num_pages * self.runner.bytes_per_page / GIB,
            self.runner.kv_format,
        )
        logger.info(
            "Maximum concurrency for %d tokens per request: %.2fx",
            self.max_model_len,
            num_pages * config.block_size / self.max_model_len,
        )
        self.workers.prepare(num_pages, longest_step)
        self.scheduler = Scheduler(
            PagePool(num_pages, config.block_size, self._host_pages()),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=policy,
            prefix_caching=config.enable_prefix_caching,
            pace=StepPace(config.target_itl_ms / 1e3) if config.target_itl_ms else None,
            window=self.model_config.longest_window,
            speculation=make_speculation(
                config.speculation,
                max_model_len=self.max_model_len,
                looks_ahead=self.runner.looks_ahead,
            ),
        )
        self._transfers = PageTransfers.make(
            config, self.model_config, self.max_model_len, self.workers, self.scheduler
        )
        self.step_ranges = StepRanges()
        self.profiler = ProfileControl(Recorder(self.runner, self.step_ranges))
        self._requests: dict[str, Request] = {}
        # Masks follow drafts, and every rank samples: then rows wait for the token before.
        self._waits = self.scheduler.speculation is not None or self.workers.num_ranks > 1
        self._masks = MaskJobs()
        self._telling: set[str] = set()  # of these, who asks what steps tell of prompts
        self.adapters = make_table(config, self.workers.adapters)
        constrained = Constrained(config.model, self.model_config)
        self._entrance = Entrance(self.scheduler, constrained, self.adapters, self._transfers)
        self._rows = RequestRows(config.max_num_seqs)
        self._in_flight: deque[_Flight] = deque()
        self._last_result = 0.0  # when the last step's tokens came, by `clock`
        self._clock = clock
        self._deadlines = Deadlines()
        self._unreported = NO_STEP  # what the last step did
        self._max_in_flight = steps_in_flight
        if steps_in_flight is None:
            ahead = config.async_scheduling and not self.workers.computes_in_launch
            self._max_in_flight = int(ahead)
        self._seeds = torch.Generator().manual_seed(config.seed)

    @property
    def runner(self) -> ModelRunner:
        return self.workers.runner

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    def has_work(self) -> bool:
        return bool(self._in_flight or self.scheduler.num_requests) or self._entrance.has_work

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
        subject = f"request {request_id}"
        length = len(prompt_token_ids)
        if request_id in self._requests:
            raise InputError(subject, "is running already", "give each request its own id")
        if params.n != 1:
            raise ValueError("the engine runs one output for each request; callers fan out n")
        if not 0 < length < self.max_model_len:
            raise InputError(
                subject,
                f"expected a prompt of 1 to {self.max_model_len - 1} tokens, found {length}",
                "shorten it" if length else "give at least one token",
            )
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= self.vocab_size:
            wrong = next(token for token in prompt_token_ids if not 0 <= token < self.vocab_size)
            raise InputError(subject, f"token id {wrong} is not in 0..{self.vocab_size - 1}")
        pooling = handling.pooling
        if pooling is not None:
            check_pooling(subject, pooling, self.model_config)
            params = SamplingParams(max_tokens=1, temperature=0)
        elif self.model_config.instead_of_head:
            raise InputError(subject, NO_HEAD, "ask for vectors: /v1/embeddings, LLM.embed")
        biased = [token for token, _ in params.logit_bias]
        for name, tokens in (
            ("logit_bias", biased),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", tuple(chain.from_iterable(params.bad_words_token_ids))),
        ):
            token = max(tokens, default=0)
            if token >= self.vocab_size:
                raise InputError(
                    f"{subject} {name}", f"token id {token} is not in 0..{self.vocab_size - 1}"
                )
        if params.bad_words and not params.bad_words_token_ids:
            raise InputError(
                f"{subject} bad_words", "have no token ids", "give bad_words_token_ids, too"
            )
        room = self.max_model_len - length
        seed = params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        request = Request(
            request_id=request_id,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=length,
            # A prompt alone (0) also needs a step that samples: its token is dropped.
            max_tokens=room if params.max_tokens is None else min(max(params.max_tokens, 1), room),
            params=params,
            seed=seed,
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_ids=frozenset() if params.ignore_eos else self.model_config.eos_token_ids,
            client=client,
            group=group,
            priority=handling.priority,
            cache_salt=handling.cache_salt,
            arrived=self._clock() if arrived is None else arrived,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            reads_cache=params.prompt_logprobs is None
            and (pooling is None or pooling.kind in KINDS_OF_LAST_ROW),
            pooled=None if pooling is None else Pooled(params=pooling),
            follows_last=self._waits and params.structured_outputs is not None,
            adapter=handling.lora and adapters_of(self.adapters).find(handling.lora),
        )
        if params.has_filter:
            request.token_filter = token_filter(request, self.vocab_size)
            request.follows_last |= self._waits and request.token_filter.follows_output
        if handling.beam_search is not None and self.scheduler.speculation is not None:
            raise InputError(
                f"request {request_id} use_beam_search",
                "does not run beside speculation",
                "start the engine without --speculative-config",
            )
        if handling.beam_search is not None:
            request.beams = BeamGroup(request, handling.beam_search, self.vocab_size)
        self._entrance.add(request)
        self._requests[request_id] = request
        if params.structured_outputs is not None:
            self._masks.add(request)
        if request.prompt_logprobs is not None or request.pooled is not None:
            self._telling.add(request_id)
        if handling.timeout is not None:
            self._deadlines.add(request, handling.timeout)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages; it emits nothing more. An unknown id is ignored."""
        request = self._forget(request_id)
        if request is not None:
            self._drop(request)

    def _forget(self, request_id: str) -> Request | None:
        self._telling.discard(request_id)
        self._masks.forget(request_id)
        return self._requests.pop(request_id, None)

    def step(self) -> list[RequestEvent]:
        """Plan and launch a step, then take the results that are due. Returns their events."""
        events = [self._miss(request) for request in self._deadlines.missed(self._clock())]
        events += self._entrance.admit(
            is_idle=not self._in_flight and not self.scheduler.num_requests
        )
        if self._waits:
            self._masks.prepare()
        plan = self.scheduler.schedule()
        self._unreported = self._step_facts(plan)
        for request in plan.preempted:
            logger.warning(
                "KV pages ran out: %s gives its pages back and computes %d tokens again",
                request.request_id,
                request.num_known,
            )
        if plan.chunks:
            step = StepInput.build(
                plan,
                page_size=self.config.block_size,
                rows=self._rows,
                is_split=not self._waits,
            )
            prompts = pools = None
            if self._telling:
                prompts, pools = plan_prompt_rows(plan), plan_pool_rows(plan)
            if prompts is not None:
                step = replace(step, prompt_rows=prompts.rows)
            if pools is not None:
                step = replace(step, pool_rows=pools.rows)
            launched = self._clock()
            try:
                if step.awaits_masks:
                    # The device computes while the host reads the tokens that the masks follow.
                    self._masks.begin(plan)
                    with self.step_ranges.around(plan):
                        self.workers.launch_forward(step)
                    events += self._take_results(0)
                    late = self._masks.late(plan, self.workers.is_computing)
                    step = step.with_masks(plan, self._rows, late)
                    handle = self.workers.launch_sampling(step)
                    plan = plan.leave_out_(late) if late else plan
                else:
                    with self.step_ranges.around(plan):
                        handle = self.workers.launch(step)
            except torch.OutOfMemoryError as error:
                # What is in flight first: it may hold tokens of the same requests.
                return self._ended(events + self._take_results(0) + self._fail(plan, error))
            self._in_flight.append(_Flight(plan, prompts, pools, handle, launched))
        events += self._take_results(self._max_in_flight if plan.chunks else 0)
        if not plan.chunks and not events:
            self._masks.wait_a_little()
        if self.profiler.is_armed:
            self.profiler.after_step()
        return self._ended(events)

    def _take_results(self, num_left: int) -> list[RequestEvent]:
        """Wait for the steps in flight, the oldest first, but the last `num_left`."""
        events: list[RequestEvent] = []
        while len(self._in_flight) > num_left:
            flight = self._in_flight.popleft()
            if flight.prompts is not None:
                flight.handle.prompts.give_to(flight.prompts)
            if flight.pools is not None:
                flight.handle.pools.give_to(flight.pools)
            sampled, logprobs = flight.handle.result(), flight.handle.logprobs()
            self.workers.check()  # where a rank was missing, these tokens mean nothing
            self._measure(flight, has_waited=bool(sampled))
            emitted = None
            if flight.plan.drafting is not None:
                emitted, drafts = flight.handle.num_emitted(), flight.handle.proposed()
                if drafts is not None:
                    self.scheduler.speculation.take_drafts(flight.plan.chunks, drafts)
            events += self.scheduler.update(flight.plan, sampled, logprobs, emitted)
        return events

    def _fail(self, plan: StepPlan, error: torch.OutOfMemoryError) -> list[RequestEvent]:
        """End the requests of a step that the device had no memory for. The others go on."""
        self.workers.free_unused()
        reason = (
            f"the device ran out of memory in a step of {plan.num_tokens} tokens; lower"
            " --max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization"
        )
        logger.error("%s: %s", reason, str(error).partition("\n")[0])
        return [
            self.scheduler.fail(request, reason)
            for request in {chunk.request: None for chunk in plan.chunks}
            if request.status is not Status.FINISHED
        ]

    def _ended(self, events: list[RequestEvent]) -> list[RequestEvent]:
        """Forget the requests that events end. Returns the events that may be told."""
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
        scheduler, pool = self.scheduler, self.scheduler.pool
        step, self._unreported = self._unreported, NO_STEP
        return EngineReport(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._entrance.num_waiting,
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_pages_used=pool.num_pages - pool.num_free,
            num_pages=pool.num_pages,
            drafts=() if scheduler.speculation is None else scheduler.speculation.take_counts(),
            running_adapters=() if self.adapters is None else self.adapters.names_in_use(),
            waiting_adapters=() if self.adapters is None else self.adapters.names_waited_for(),
            **step,
        )

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
        try:
            step = StepInput.of_sequence(
                token_ids, pages, page_size=page_size, params=SamplingParams()
            )
            # What those pages held goes to the host first.
            step = replace(step, page_moves=pool.take_moves())
            return self.workers.logits(step)
        finally:
            pool.release_(pages)

    def _step_facts(self, plan: StepPlan) -> dict[str, Any]:
        """The fields of EngineReport that tell of a step."""
        now, cache = self._clock(), self.scheduler.cache
        for request in plan.admitted:
            request.queue_seconds = now - request.arrived
        looked_up = cache.take_counts()
        external = self._transfers.take_counts()
        return {
            "num_step_tokens": plan.num_tokens,
            "num_preempted": len(plan.preempted),
            "num_prefix_queries": looked_up[0],
            "num_prefix_hits": looked_up[1],
            "num_external_queries": external[0],
            "num_external_hits": external[1],
            "queue_seconds": tuple(request.queue_seconds for request in plan.admitted),
        }

    def _measure(self, flight: _Flight, has_waited: bool) -> None:
        """Tell the pace how long a step took, whose tokens have come just now.

        It began when it was launched, or when the one before was done. Nobody waits for a step
        that samples nothing, so when it was done is not known.
        """
        now = self._clock()
        seconds = now - max(flight.launched, self._last_result)
        if self.scheduler.pace is not None and has_waited and seconds > 0:
            self.scheduler.pace.observe(load_of(flight.plan.chunks), seconds)
        if flight.plan.drafting is not None and has_waited and seconds > 0:
            self.scheduler.speculation.observe_step(flight.plan, seconds)
        self._last_result = now if has_waited else math.inf

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

    def _host_pages(self) -> HostPages | None:
        """Room for KV pages in the host's memory, where it is asked for."""
        page_bytes = self.workers.bytes_per_page
        count = num_slots(self.config, page_bytes)
        if not count or not self.config.enable_prefix_caching:
            return None
        logger.info("KV pages on the host: %d, %.2f GiB", count, count * page_bytes / GIB)
        self.workers.offload_pages(count)
        return HostPages(count)

    def _pick_num_pages(self, largest_step: StepInput) -> int:
        config = self.config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        fits = self.workers.num_pages_that_fit(largest_step)
        # More than this can never be in use.
        return min(fits, config.max_num_seqs * -(-self.max_model_len // config.block_size))
