"""Runs a job: one engine request for each choice, their text as it comes. Knows no HTTP.

`client` says whose the job is. Leaving a generator early, for whatever reason, aborts its requests
in the engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from qserve.engine.request import Hypothesis, RequestEvent, TokenLogprobs
from qserve.sampling_params import SamplingParams
from qserve.server.errors import ApiError, deadline_passed, engine_dead, generation_failed
from qserve.server.job import Job
from qserve.server.metrics import OutputMeter
from qserve.server.service import Service
from qserve.text import TextDelta, TextStream

logger = logging.getLogger(__name__)

Deltas = AsyncGenerator[tuple[int, TextDelta], None]  # each with the index of its choice


@dataclass(slots=True, kw_only=True)
class Output:
    """One finished choice."""

    text: str = ""
    num_tokens: int = 0
    num_cached: int = 0  # tokens of the prompt that were not computed
    drafts: tuple[int, int] = (0, 0)  # that became output, and that did not
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pieces: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # of each piece: tokens up to its end
    token_ids: list[int] = field(default_factory=list)  # hidden ones included
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # None: not asked for
    pooled: bytes = b""  # vectors of the prompt, where asked for
    beam: Hypothesis | None = None  # it is one of a beam search

    @property
    def parts(self) -> Iterator[tuple[str, int]]:
        """The text piece by piece, each with the number of tokens that brought it."""
        starts = (0, *self.ends)
        for text, start, end in zip(self.pieces, starts, self.ends, strict=False):
            yield text, end - start

    def add(self, delta: TextDelta) -> None:
        self.pieces.append(delta.text)
        self.num_tokens += len(delta.token_ids)
        self.num_cached, self.drafts = delta.num_cached, delta.drafts
        self.token_ids += delta.token_ids
        self.ends.append(len(self.token_ids))
        self.logprobs += delta.logprobs
        self.pooled, self.beam = delta.pooled, delta.beam
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.text = "".join(self.pieces)


async def run(service: Service, client: str, job: Job) -> list[Output]:
    """All choices, finished. Raises ApiError, and RefusedError if the engine refuses one."""
    outputs = [Output() for _ in range(job.num_choices)]
    async with aclosing(deltas(service, client, job)) as stream:
        async for index, delta in stream:
            outputs[index].add(delta)
    return outputs


async def deltas(service: Service, client: str, job: Job) -> Deltas:
    """The deltas of all choices in the order they come. Raises as `run` does."""
    lengths = [0] * job.num_choices
    with service.admission.admit(client, job.num_outputs, job.num_engine_tokens):
        service.metrics.count_request(job.params[0].n)
        with service.tracing.request(job, service.model_name) as span:
            async with aclosing(_in_time(job, _choices(service, client, job))) as stream:
                async for index, delta in stream:
                    lengths[index] += len(delta.token_ids)
                    span.take(len(delta.token_ids))
                    yield index, delta
    service.metrics.count_longest(max(lengths))


async def _in_time(job: Job, stream: Deltas) -> Deltas:
    """The same deltas; raises ApiError(408) when the job has had its time.

    Around each wait for the engine; how long a client may take to read is limited elsewhere.
    """
    end = None
    if job.timeout is not None:
        left = job.timeout - (time.perf_counter() - job.arrived)
        end = asyncio.get_running_loop().time() + left
    async with aclosing(stream):
        if end is None:
            async for item in stream:
                yield item
            return
        while True:
            try:
                async with asyncio.timeout_at(end):
                    item = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise deadline_passed(job.timeout) from None
            yield item


async def _choices(service: Service, client: str, job: Job) -> Deltas:
    is_search = job.handling.beam_search is not None
    num_runs, run_one = (len(job.prompts), _beams) if is_search else (job.num_choices, _choice)
    if num_runs == 1:
        async with aclosing(run_one(service, client, job, 0)) as stream:
            async for item in stream:
                yield item
        return
    # Holds one delta of each choice at most; behind it the engine's events merge.
    inbox: asyncio.Queue = asyncio.Queue(maxsize=1)
    tasks: list[asyncio.Task] = []
    runs = (run_one(service, client, job, index) for index in range(num_runs))
    starting = asyncio.create_task(_start(tasks, inbox, runs))
    try:
        num_running = num_runs
        while num_running:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        starting.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(starting, *tasks, return_exceptions=True)


async def _start(tasks: list[asyncio.Task], inbox: asyncio.Queue, runs: Iterable[Deltas]) -> None:
    """Start the choices, each in its own turn of the event loop: there may be a thousand."""
    for run_of_one in runs:
        tasks.append(asyncio.create_task(_feed(inbox, run_of_one)))
        await asyncio.sleep(0)


async def _feed(inbox: asyncio.Queue, run_of_one: Deltas) -> None:
    """Put one choice's deltas into the inbox, then None, or the error that ended it."""
    try:
        async with aclosing(run_of_one) as stream:
            async for item in stream:
                await inbox.put(item)
    except Exception as error:
        await inbox.put(error)
    else:
        await inbox.put(None)


def _events(
    service: Service,
    client: str,
    job: Job,
    index: int,
    prompt: list[int],
    params: SamplingParams,
    meter: OutputMeter,
) -> AsyncIterator[RequestEvent]:
    """What the engine tells of one of a job's choices."""
    return service.client.generate(
        f"{job.key}-{index}",
        prompt,
        params,
        meter.take,
        client,
        group=job.key,
        handling=job.handling,
    )


async def _choice(service: Service, client: str, job: Job, index: int) -> Deltas:
    prompt, params = job.choice(index)
    stream = TextStream(service.tokenizer, params, prompt)
    with service.metrics.output(job.arrived, len(prompt), params.max_tokens) as meter:
        events = _events(service, client, job, index, prompt, params, meter)
        async with aclosing(events):
            async for event in events:
                if event.finish_reason == "error":
                    raise _failure(service, job, event)
                delta = stream.push(event)
                if event.prompt_logprobs is not None:
                    delta = replace(delta, prompt_logprobs=event.prompt_logprobs)
                if event.pooled:
                    delta = replace(delta, pooled=event.pooled)
                if stream.finished:
                    meter.reason = delta.finish_reason
                    break
                yield index, delta
    # After the engine has been told of a stop string, however long the client takes to read this.
    yield index, delta


async def _beams(service: Service, client: str, job: Job, number: int) -> Deltas:
    """The beams of one prompt, each in one delta when all have ended."""
    first = number * job.params[0].n
    prompt, params = job.choice(first)
    with service.metrics.output(job.arrived, len(prompt), params.max_tokens) as meter:
        events = _events(service, client, job, first, prompt, params, meter)
        async with aclosing(events):
            async for event in events:
                if event.finish_reason == "error":
                    raise _failure(service, job, event)
        meter.reason = event.finish_reason
    for index, beam in enumerate(event.beams):
        told = event._replace(
            token_ids=beam.token_ids,
            finish_reason=beam.finish_reason,
            stop_token=beam.stop_token,
            ended_by_token=beam.ended_by_token,
            logprobs=beam.logprobs,
        )
        delta = TextStream(service.tokenizer, params, prompt).push(told)
        yield first + index, replace(delta, prompt_logprobs=event.prompt_logprobs, beam=beam)


def _failure(service: Service, job: Job, event: RequestEvent) -> ApiError:
    if event.is_asked_for:
        return ApiError(400, f"{event.error}.")
    logger.error("Request %s failed: %s", job.request_id, event.error)
    if not service.client.is_alive:
        return engine_dead(service.client.is_restarting)
    return generation_failed()
