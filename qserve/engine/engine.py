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
from qserve.engine.constrained import Constrained
from qserve.engine.deadlines import Deadlines
from qserve.engine.host_pages import HostPages
from qserve.engine.kv_pages import PagePool
from qserve.engine.memory import GIB
from qserve.engine.model_runner import ModelRunner, StepHandle
from qserve.engine.policies import make_policy
from qserve.engine.pooled import Pooled
from qserve.engine.pooling import NO_HEAD, PoolPlan, check_pooling, plan_pool_rows
from qserve.engine.prompt_logprobs import PromptPlan, plan_prompt_rows
from qserve.engine.report import EngineReport
from qserve.engine.request import Request, RequestEvent, Status
from qserve.engine.request_rows import RequestRows, dead_end
from qserve.engine.scheduler import Scheduler, load_of
from qserve.engine.step_input import StepInput
from qserve.engine.step_pace import StepPace
from qserve.engine.step_plan import StepPlan
from qserve.engine.step_ranges import StepRanges
from qserve.engine.token_filter import TokenFilter, without
from qserve.engine.workers import WorkerGroup
from qserve.handling import DEFAULT, Handling
from qserve.model.model_config import ModelConfig
from qserve.pooling_params import KINDS_OF_LAST_ROW
from qserve.profile.control import ProfileControl
from qserve.profile.recorder import Recorder
from qserve.sampling_params import SamplingParams

# The fields of EngineReport that tell of a step, and their values where there was none.
NO_STEP = {"num_step_tokens": 0, "num_preempted": 0, "queue_seconds": ()} | {
    "num_prefix_queries": 0,
    "num_prefix_hits": 0,
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
        self.config = config
        # Before the model: a name that is mistyped should not show only after a long load.
        policy = make_policy(config.scheduling_policy, prefill_batch_size=config.prefill_batch_size)
        self.model_config = ModelConfig.from_folder(config.model)
        self.max_model_len = _pick_length(config, self.model_config)
        self.model_config.check_length(self.max_model_len)
        self.workers = WorkerGroup(config, self.model_config, self.max_model_len)
        largest_step = self._largest_step()
        self.workers.compile_kernels(largest_step)
        num_pages = self._pick_num_pages(largest_step)
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
        )
        self.step_ranges = StepRanges()
        self.profiler = ProfileControl(Recorder(self.runner, self.step_ranges))
        self._requests: dict[str, Request] = {}
        self._constrained = Constrained(config.model, self.model_config)
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
        if self._in_flight or self.scheduler.num_requests:
            return True
        return self._constrained.num_waiting > 0

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
            follows_last=params.structured_outputs is not None,
            pooled=None if pooling is None else Pooled(params=pooling),
        )
        if params.has_filter:
            self._filter_tokens(request)
        if params.structured_outputs is None:
            self.scheduler.add(request)
        else:
            self.scheduler.check(request)
            self._constrained.add(request)
        self._requests[request_id] = request
        if handling.timeout is not None:
            self._deadlines.add(request, handling.timeout)

    def _filter_tokens(self, request: Request) -> None:
        """Give a request its filter. Raises InputError where that leaves nothing to begin with."""
        params = request.params
        made = TokenFilter(self.vocab_size, params.allowed_token_ids, params.bad_words_token_ids)
        mask = made.mask(request.token_ids, request.num_prompt_tokens)
        if params.min_tokens:
            mask = without(mask, request.stop_token_ids | request.eos_token_ids)
        if not mask.any():
            raise InputError(f"request {request.request_id}", dead_end(request), "allow more")
        request.token_filter = made
        request.follows_last |= made.follows_output

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages; it emits nothing more. An unknown id is ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._drop(request)

    def step(self) -> list[RequestEvent]:
        """Plan and launch a step, then take the results that are due. Returns their events."""
        events = [self._miss(request) for request in self._deadlines.missed(self._clock())]
        events += self._admit_constrained()
        plan = self.scheduler.schedule()
        self._unreported = self._step_facts(plan)
        for request in plan.preempted:
            logger.warning(
                "KV pages ran out: %s gives its pages back and computes %d tokens again",
                request.request_id,
                request.num_known,
            )
        if plan.chunks:
            step = StepInput.build(plan, page_size=self.config.block_size, rows=self._rows)
            prompts = plan_prompt_rows(plan)
            if prompts is not None:
                step = replace(step, prompt_rows=prompts.rows)
            pools = plan_pool_rows(plan)
            if pools is not None:
                step = replace(step, pool_rows=pools.rows)
            launched = self._clock()
            try:
                with self.step_ranges.around(plan):
                    handle = self.workers.launch(step)
            except torch.OutOfMemoryError as error:
                # What is in flight first: it may hold tokens of the same requests.
                return self._ended(events + self._take_results(0) + self._fail(plan, error))
            self._in_flight.append(_Flight(plan, prompts, pools, handle, launched))
        events += self._take_results(self._max_in_flight if plan.chunks else 0)
        if self.profiler.is_armed:
            self.profiler.after_step()
        return self._ended(events)

    def _admit_constrained(self) -> list[RequestEvent]:
        """Queue the requests whose grammars are compiled; of those that cannot be, the ends."""
        if not self._constrained.num_waiting:
            return []
        events = []
        is_idle = not self._in_flight and not self.scheduler.num_requests
        for request, error in self._constrained.take_compiled(wait_a_little=is_idle):
            if error is None:
                self.scheduler.add(request)
            else:
                event = RequestEvent.failure(request.request_id, error)
                events.append(event._replace(is_asked_for=True))
        return events

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
            self._measure(flight, has_waited=bool(sampled))
            events += self.scheduler.update(flight.plan, sampled, logprobs)
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
        """Forget the requests that events end. Returns the events."""
        for event in events:
            if event.finish_reason is not None:
                self._requests.pop(event.request_id, None)
        return events

    def reset_prefix_cache(self) -> None:
        """Forget what KV pages hold: requests that come find none. Running ones go on."""
        self.scheduler.reset_prefix_cache()

    def use_idle_time(self) -> bool:
        """Do a piece of work, of 0.1 s at most, that a start left. Returns False where none is."""
        return self.workers.capture_next()

    def report(self) -> EngineReport:
        """What the engine holds now, and what the last step did, unless that was told before."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        step, self._unreported = self._unreported, NO_STEP
        return EngineReport(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._constrained.num_waiting,
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_pages_used=pool.num_pages - pool.num_free,
            num_pages=pool.num_pages,
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
        return {
            "num_step_tokens": plan.num_tokens,
            "num_preempted": len(plan.preempted),
            "num_prefix_queries": looked_up[0],
            "num_prefix_hits": looked_up[1],
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
        self._last_result = now if has_waited else math.inf

    def _miss(self, request: Request) -> RequestEvent:
        self._drop(request)
        num_tokens = request.num_known - request.num_prompt_tokens
        reason = f"its time is up after {num_tokens} tokens"
        return RequestEvent.failure(request.request_id, reason)

    def _drop(self, request: Request) -> None:
        """End a request, wherever it is."""
        if self._constrained.remove(request):
            request.status = Status.FINISHED
        else:
            self.scheduler.finish(request)

    def _host_pages(self) -> HostPages | None:
        """Room for KV pages in the host's memory, where it is asked for."""
        num_slots = int(self.config.kv_offload_gb * GIB) // self.runner.bytes_per_page
        if not num_slots or not self.config.enable_prefix_caching:
            return None
        logger.info(
            "KV pages on the host: %d, %.2f GiB",
            num_slots,
            num_slots * self.runner.bytes_per_page / GIB,
        )
        self.runner.offload_pages(num_slots)
        return HostPages(num_slots)

    def _pick_num_pages(self, largest_step: StepInput) -> int:
        config = self.config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        fits = self.workers.num_pages_that_fit(largest_step)
        # More than this can never be in use.
        return min(fits, config.max_num_seqs * -(-self.max_model_len // config.block_size))

    def _largest_step(self) -> StepInput:
        """A step that fills the token budget and samples as many rows as a step may."""
        budget, page_size = self.config.max_num_batched_tokens, self.config.block_size
        rows = min(self.config.max_num_seqs, budget)
        count = min(budget // rows, self.max_model_len)
        return StepInput.of_sequence(
            [0] * count,
            list(range(-(-count // page_size))),
            page_size=page_size,
            params=SamplingParams(top_p=0.9),
            num_copies=rows,
        )


def _pick_length(config: EngineConfig, model: ModelConfig) -> int:
    longest, source = model.context.length, model.context.source
    length = longest if config.max_model_len is None else config.max_model_len
    if not 2 <= length <= longest:
        raise InputError(
            "--max-model-len",
            f"expected 2 to {longest} (config.json: {source}), found {length}",
        )
    logger.info("Using max model len %d (config.json: %d by %s)", length, longest, source)
    return length
