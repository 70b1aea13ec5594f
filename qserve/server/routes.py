"""The routes. Each is a few lines: read, prepare a job, run it, reply."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from qserve.server import generation
from qserve.server.body import Body
from qserve.server.cache_salt import salted_by_key
from qserve.server.client_key import client_key
from qserve.server.errors import ApiError, engine_dead, json_response
from qserve.server.event_stream import EventStream, while_connected
from qserve.server.job import Job
from qserve.server.replies import ChatReply, CompletionReply, Reply, model_card
from qserve.server.service import Service

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives, else 503."""
    client = _service(request).client
    return Response() if client.is_alive else engine_dead(client.is_restarting).response


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """What Prometheus collects; of a dead engine too."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST}
    return Response(_service(request).metrics.page(), headers=headers)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(_service(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = _service(request)
    service.model.check_name(name)
    return json_response(_card(service))


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _answer(request, "completions", CompletionReply)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _answer(request, "chat", ChatReply)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Let requests that come from now on find no KV pages of earlier ones."""
    service = _service(request)
    if not service.resets_cache:
        raise ApiError(404, "This server was started without --enable-cache-reset.")
    if not service.client.is_alive:
        raise engine_dead(service.client.is_restarting)
    service.client.reset_prefix_cache()
    return Response()


async def _answer(request: Request, route: str, kind: type[Reply]) -> Response:
    service, client = _service(request), client_key(request.scope)
    with Body(request, client, service) as body:
        content = await body.read()
        arrived = time.perf_counter()
        if not service.client.is_alive:
            raise engine_dead(service.client.is_restarting)
        job = await service.preparation.job(client, service.model, route, content, arrived)
    if service.salt_by_key:
        job = replace(job, handling=salted_by_key(job.handling, request.headers))
    reply = kind(job=job, model=service.model_name, tokenizer=service.tokenizer)
    if job.streams:
        return EventStream(_chunks(service, client, job, reply))
    outputs = await while_connected(request.receive, generation.run(service, client, job))
    # In a thread: with log probabilities of many outputs it takes seconds.
    return await service.preparation.run(client, lambda: json_response(reply.whole(outputs)))


async def _chunks(
    service: Service, client: str, job: Job, reply: Reply
) -> AsyncGenerator[dict, None]:
    opened: set[int] = set()
    num_tokens, num_cached = 0, {}
    async with aclosing(generation.deltas(service, client, job)) as deltas:
        async for index, delta in deltas:
            num_tokens += len(delta.token_ids)
            num_cached[index] = delta.num_cached
            if index not in opened:
                opened.add(index)
                opening = reply.opening(index)
                if opening is not None:
                    yield opening
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                yield reply.chunk(index, delta)
    if job.streams_usage:
        yield reply.usage_chunk(num_tokens, num_cached)


def _service(request: Request) -> Service:
    return request.app.state.service


def _card(service: Service) -> dict:
    return model_card(service.model_name, service.created, service.client.max_model_len)
