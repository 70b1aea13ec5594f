"""Runs a job: one engine request per choice, and yields the text as it arrives.

`client` is the job's client_key (http/clients.py). If a generator is closed early, its engine
requests are aborted.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from qserve.engine.ipc.client import CLOSED
from qserve.engine.token_event import (
    Hypothesis,
    RequestFacts,
    TokenEvent,
    TokenLogprobs,
)
from qserve.params.sampling_params import SamplingParams
from qserve.server.http.errors import (
    ApiError,
    deadline_passed,
    engine_dead,
    engine_lost,
    generation_failed,
    stopped,
)
from qserve.server.observability.metrics import OutputMeter
from qserve.server.requests.job import Job
from qserve.server.service import Service
from qserve.text.text_stream import TextDelta, TextStream

logger = logging.getLogger(__name__)

Deltas = AsyncGenerator[tuple[int, TextDelta], None]  # (index of the choice, delta)


@dataclass(slots=True, kw_only=True)
class Output:
    """One choice: the sum of its deltas."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    facts: RequestFacts = RequestFacts()
    pieces: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # number of tokens up to the end of each piece
    token_ids: list[int] = field(default_factory=list)  # includes tokens without text
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # None: not requested
    pooled: bytes = b""  # float32 result of a pooling request
    beam: Hypothesis | None = None  # the beam, for a beam search

    @property
    def parts(self) -> Iterator[tuple[str, int]]:
        """Pieces of the text, each with its number of tokens."""
        starts = (0, *self.ends)
        for text, start, end in zip(self.pieces, starts, self.ends, strict=False):
            yield text, end - start

    def add(self, delta: TextDelta) -> None:
        event = delta.event
        self.facts = event.facts
        self.pieces.append(delta.text)
        self.token_ids += event.token_ids
        self.ends.append(len(self.token_ids))
        self.logprobs += event.logprobs
        self.pooled, self.beam = event.pooled, delta.beam
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.text = "".join(self.pieces)


async def run(service: Service, client: str, job: Job) -> list[Output]:
    """Return all finished choices. Raises ApiError; RefusedError if the engine refuses a choice."""
    outputs = [Output() for _ in range(job.num_choices)]
    async with aclosing(deltas(service, client, job)) as stream:
        async for index, delta in stream:
            outputs[index].add(delta)
    return outputs


async def deltas(service: Service, client: str, job: Job) -> Deltas:
    """Yield the deltas of all choices as they arrive. Raises the errors of `run`."""
    lengths = [0] * job.num_choices
    with service.admission.admit(client, job.num_outputs, job.num_engine_tokens):
        service.metrics.count_request(job.params[0].n)
        with service.tracing.request(job, service.model_name) as span:
            choices = _share_prompt_logprobs(job, _choices(service, client, job))
            async with aclosing(_in_time(job, choices)) as stream:
                async for index, delta in stream:
                    num_tokens = len(delta.event.token_ids)
                    lengths[index] += num_tokens
                    span.take(num_tokens, delta.event.facts.queue_seconds)
                    yield index, delta
    service.metrics.count_longest(max(lengths))


async def _in_time(job: Job, stream: Deltas) -> Deltas:
    """Pass the deltas on; raise ApiError(408) when the deadline is exceeded.

    The deadline limits the time of the engine. http_protocol.py limits the time that a client takes
    to read.
    """
    end = None
    if job.arrival.timeout is not None:
        left = job.arrival.timeout - (time.perf_counter() - job.arrival.time)
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
                raise deadline_passed(job.arrival.timeout) from None
            yield item


async def _share_prompt_logprobs(job: Job, stream: Deltas) -> Deltas:
    """Pass the deltas on; add the prompt's log probabilities to each choice's first delta.

    The engine computes them only for the first choice of a prompt. Deltas of the other choices wait
    until they are known.
    """
    per_prompt = job.params[0].n
    # index of a prompt -> its log probabilities
    found: dict[int, tuple[TokenLogprobs | None, ...]] = {}
    begun: set[int] = set()  # choices with at least one delta yielded
    # index of a prompt -> deltas of its other choices, which wait
    held: dict[int, list[tuple[int, TextDelta]]] = {}
    async with aclosing(stream):
        async for index, delta in stream:
            prompt, repeat = divmod(index, per_prompt)
            if job.params[prompt].prompt_logprobs is None or job.options.beam_search is not None:
                yield index, delta
                continue
            if delta.event.prompt_logprobs is not None:
                found[prompt] = delta.event.prompt_logprobs
            if repeat and prompt not in found and delta.event.prompt_logprobs is None:
                held.setdefault(prompt, []).append((index, delta))
                continue
            for number, each in ((index, delta), *held.pop(prompt, ())):
                if number not in begun and number % per_prompt and prompt in found:
                    event = each.event._replace(prompt_logprobs=found[prompt])
                    each = replace(each, event=event)
                begun.add(number)
                yield number, each
    assert not held, "the first choice of a prompt reports its log probabilities"


async def _choices(service: Service, client: str, job: Job) -> Deltas:
    is_search = job.options.beam_search is not None
    num_runs, run_one = (len(job.prompts), _beams) if is_search else (job.num_choices, _choice)
    if num_runs == 1:
        async with aclosing(run_one(service, client, job, 0)) as stream:
            async for item in stream:
                yield item
        return
    # Each choice has at most one delta waiting here; later events of the engine are merged first.
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
    """Start the choices, one per iteration of the event loop, since there may be a thousand."""
    for run_of_one in runs:
        tasks.append(asyncio.create_task(_feed(inbox, run_of_one)))
        await asyncio.sleep(0)


async def _feed(inbox: asyncio.Queue, run_of_one: Deltas) -> None:
    """Put one choice's deltas into the inbox, then None, or the exception that ended the choice."""
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
) -> AsyncIterator[TokenEvent]:
    """Submit one choice to the engine, and return its events."""
    return service.client.generate(
        f"{job.key}-{index}",
        prompt,
        params,
        meter.take,
        client,
        group=job.key,
        options=job.request_options_of(index),
    )


async def _choice(service: Service, client: str, job: Job, index: int) -> Deltas:
    prompt, params = job.choice(index)
    stream = TextStream(service.tokenizer, params, prompt, all_logprobs=job.returns_token_ids)
    with service.metrics.output(job.arrival.time, len(prompt), params.max_tokens) as meter:
        events = _events(service, client, job, index, prompt, params, meter)
        async with aclosing(events):
            async for event in events:
                if event.finish_reason == "error":
                    raise _failure(service, job, event)
                delta = stream.push(event)
                if stream.finished:
                    meter.reason = delta.finish_reason
                    break
                yield index, delta
    # Yield the last delta after the engine request has ended: the client may be slow to read it.
    yield index, delta


async def _beams(service: Service, client: str, job: Job, number: int) -> Deltas:
    """Run the beam search of one prompt; at its end yield one delta per beam."""
    first = number * job.params[0].n
    prompt, params = job.choice(first)
    with service.metrics.output(job.arrival.time, len(prompt), params.max_tokens) as meter:
        events = _events(service, client, job, first, prompt, params, meter)
        async with aclosing(events):
            async for event in events:
                if event.finish_reason == "error":
                    raise _failure(service, job, event)
        meter.reason = event.finish_reason
    for index, beam in enumerate(event.beams):
        of_beam = event._replace(
            token_ids=beam.token_ids,
            finish_reason=beam.finish_reason,
            stop_token=beam.stop_token,
            ended_by_token=beam.ended_by_token,
            logprobs=beam.logprobs,
        )
        keeps = job.returns_token_ids
        delta = TextStream(service.tokenizer, params, prompt, all_logprobs=keeps).push(of_beam)
        yield first + index, replace(delta, beam=beam)


def _failure(service: Service, job: Job, event: TokenEvent) -> ApiError:
    if event.is_asked_for:
        return ApiError.relayed(503 if event.is_temporary else 400, f"{event.error}.")
    if event.error == CLOSED:
        logger.warning("Request %s did not finish before the server stopped", job.request_id)
        return stopped()
    logger.error("Request %s failed: %s", job.request_id, event.error)
    if not service.client.is_alive:
        return engine_dead(service.client.is_restarting)
    return engine_lost() if event.has_lost_engine else generation_failed()
