"""The routes. Each is a few lines: read, make a job in a thread, run it, reply."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from qserve.server import generation
from qserve.server.connection import EventStream, read_body, while_connected
from qserve.server.errors import engine_dead, json_response
from qserve.server.job import Job, chat_job, completion_job
from qserve.server.replies import ChatReply, CompletionReply, Reply, model_card
from qserve.server.service import Service

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives, else 503."""
    return Response() if _service(request).client.is_alive else engine_dead().response


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
    service.check_model(name)
    return json_response(_card(service))


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _answer(request, completion_job, CompletionReply)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _answer(request, chat_job, ChatReply)


async def _answer(
    request: Request, make_job: Callable[[Service, bytes, float], Job], kind: type[Reply]
) -> Response:
    service = _service(request)
    body = await read_body(request, service.max_body_bytes)
    arrived = time.perf_counter()
    if not service.client.is_alive:
        raise engine_dead()
    job = await asyncio.to_thread(make_job, service, body, arrived)
    reply = kind(job=job, model=service.model_name, tokenizer=service.tokenizer)
    if job.streams:
        return EventStream(_chunks(service, job, reply))
    outputs = await while_connected(request.receive, generation.run(service, job))
    # In a thread: with log probabilities of many outputs it takes seconds.
    return await asyncio.to_thread(lambda: json_response(reply.whole(outputs)))


async def _chunks(service: Service, job: Job, reply: Reply) -> AsyncGenerator[dict, None]:
    opened: set[int] = set()
    num_tokens = 0
    async with aclosing(generation.deltas(service, job)) as deltas:
        async for index, delta in deltas:
            num_tokens += len(delta.token_ids)
            if index not in opened:
                opened.add(index)
                opening = reply.opening(index)
                if opening is not None:
                    yield opening
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                yield reply.chunk(index, delta)
    if job.streams_usage:
        yield reply.usage_chunk(num_tokens)


def _service(request: Request) -> Service:
    return request.app.state.service


def _card(service: Service) -> dict:
    return model_card(service.model_name, service.created, service.client.max_model_len)
