"""The routes that generate. Each is a few lines: read, prepare a job, run it, reply."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from qserve.server import deadline, generation, ignored_fields, request_id
from qserve.server.cache_salt import salted_by_key
from qserve.server.client_key import client_key
from qserve.server.errors import ApiError, engine_dead, json_response
from qserve.server.event_stream import EventStream, while_connected
from qserve.server.job import Job
from qserve.server.prepared import prepared_job
from qserve.server.replies import ChatReply, CompletionReply, Counts, Reply
from qserve.server.response_reply import ResponseReply
from qserve.server.route_list import RouteList
from qserve.server.service import Service, service_of
from qserve.server.tracing import trace_headers

routes = RouteList()


@routes.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _answer(request, "completions", CompletionReply)


@routes.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _answer(request, "chat", ChatReply)


@routes.post("/v1/responses")
async def responses(request: Request) -> Response:
    service, client, job, headers = await job_of(request, "responses", ResponseReply.prefix)
    reply = ResponseReply(job=job, model=service.name_for(job), tokenizer=service.tokenizer)
    if job.streams:
        events = _events(service, client, job, reply)
        return EventStream(events, headers, are_named=True)
    return await _whole(request, service, client, job, reply, headers)


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Let requests that come from now on find no KV pages of earlier ones."""
    service = service_of(request)
    if not service.resets_cache:
        raise ApiError(404, "This server was started without --enable-cache-reset.")
    if not service.client.is_alive:
        raise engine_dead(service.client.is_restarting)
    service.client.reset_prefix_cache()
    return Response()


async def _answer(request: Request, route: str, kind: type[Reply]) -> Response:
    service, client, job, headers = await job_of(request, route, kind.prefix)
    reply = kind(job=job, model=service.name_for(job), tokenizer=service.tokenizer)
    if job.streams:
        return EventStream(_chunks(service, client, job, reply), headers)
    return await _whole(request, service, client, job, reply, headers)


async def _whole(
    request: Request,
    service: Service,
    client: str,
    job: Job,
    reply: Reply | ResponseReply,
    headers: dict[str, str],
) -> Response:
    outputs = await while_connected(request.receive, generation.run(service, client, job))
    # In a thread: with log probabilities of many outputs it takes seconds.
    return await service.preparation.run(
        client, lambda: json_response(reply.whole(outputs), headers=headers)
    )


async def job_of(
    request: Request, route: str, prefix: str
) -> tuple[Service, str, Job, dict[str, str]]:
    """The service, the client's name, the job of the request's body, headers of the reply."""
    service, client = service_of(request), client_key(request.scope)
    job = await prepared_job(request, service, client, route)
    if service.salt_by_key:
        job = replace(job, handling=salted_by_key(job.handling, request.headers))
    name = request_id.settle(request.state, job.asked_id)
    timeout = deadline.seconds(request.headers, service.request_timeout)
    job = replace(job, request_id=prefix + name, timeout=timeout)
    if service.tracing.is_on:
        job = replace(job, trace_headers=trace_headers(request.headers))
    headers = ignored_fields.headers(job, priority_counts=service.priority_counts)
    return service, client, job, headers


async def _chunks(
    service: Service, client: str, job: Job, reply: Reply
) -> AsyncGenerator[dict, None]:
    opened: set[int] = set()
    counts = Counts(parsing=job.parsing)
    async with aclosing(generation.deltas(service, client, job)) as deltas:
        async for index, delta in deltas:
            if index not in opened:
                opened.add(index)
                opening = reply.opening(index, delta, counts)
                if opening is not None:
                    yield opening
            counts.add(index, delta)
            # Also of tokens whose text is held back: clients count and time chunks as tokens.
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                yield reply.chunk(index, delta, counts)
    if job.streams_usage:
        yield reply.usage_chunk(counts)


async def _events(
    service: Service, client: str, job: Job, reply: ResponseReply
) -> AsyncGenerator[dict, None]:
    async with aclosing(generation.deltas(service, client, job)) as deltas:
        async for event in reply.events(deltas):
            yield event
