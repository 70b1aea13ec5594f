"""The routes. Each is a few lines: read, prepare a job, run it, reply."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from qserve.server import generation, ignored_fields, request_id
from qserve.server.body import Body
from qserve.server.client_key import client_key
from qserve.server.errors import engine_dead, json_response
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


async def _answer(request: Request, route: str, kind: type[Reply]) -> Response:
    service, client = _service(request), client_key(request.scope)
    with Body(request, client, service) as body:
        content = await body.read()
        arrived = time.perf_counter()
        if not service.client.is_alive:
            raise engine_dead(service.client.is_restarting)
        job = await service.preparation.job(client, service.model, route, content, arrived)
    name = request_id.settle(request.state, job.asked_id)
    job = replace(job, request_id=f"{kind.prefix}-{name}")
    headers = ignored_fields.headers(job)
    reply = kind(job=job, model=service.model_name, tokenizer=service.tokenizer)
    if job.streams:
        return EventStream(_chunks(service, client, job, reply), headers)
    outputs = await while_connected(request.receive, generation.run(service, client, job))
    # In a thread: with log probabilities of many outputs it takes seconds.
    return await service.preparation.run(
        client, lambda: json_response(reply.whole(outputs), headers=headers)
    )


async def _chunks(
    service: Service, client: str, job: Job, reply: Reply
) -> AsyncGenerator[dict, None]:
    opened: set[int] = set()
    num_tokens = 0
    async with aclosing(generation.deltas(service, client, job)) as deltas:
        async for index, delta in deltas:
            if index not in opened:
                opened.add(index)
                opening = reply.opening(index, num_tokens)
                if opening is not None:
                    yield opening
            num_tokens += len(delta.token_ids)
            # Also of tokens whose text is held back: clients count and time chunks as tokens.
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                yield reply.chunk(index, delta, num_tokens)
    if job.streams_usage:
        yield reply.usage_chunk(num_tokens)


def _service(request: Request) -> Service:
    return request.app.state.service


def _card(service: Service) -> dict:
    return model_card(service.model_name, service.created, service.client.max_model_len)
