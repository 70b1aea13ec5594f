"""The routes that make vectors and scores of texts, and generate nothing."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qserve.server import generation, pooling_replies
from qserve.server.errors import json_response
from qserve.server.event_stream import while_connected
from qserve.server.generation import Output
from qserve.server.job import Job
from qserve.server.route_list import RouteList
from qserve.server.routes import job_of

routes = RouteList()


@routes.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    return await _answer(request, "embeddings", "embd", pooling_replies.embeddings)


@routes.post("/pooling")
async def pooling(request: Request) -> Response:
    return await _answer(request, "pooling", "pool", pooling_replies.pooling)


@routes.post("/score")
@routes.post("/v1/score")
async def score(request: Request) -> Response:
    return await _answer(request, "score", "score", pooling_replies.scores)


@routes.post("/rerank")
@routes.post("/v1/rerank")
@routes.post("/v2/rerank")
async def rerank(request: Request) -> Response:
    return await _answer(request, "rerank", "rerank", pooling_replies.ranking)


async def _answer(
    request: Request,
    route: str,
    prefix: str,
    reply: Callable[[Job, str, list[Output]], dict[str, Any]],
) -> Response:
    service, client, job, headers = await job_of(request, route, f"{prefix}-")
    outputs = await while_connected(request.receive, generation.run(service, client, job))
    # In a thread: the numbers of many vectors take a while to write.
    return await service.preparation.run(
        client, lambda: json_response(reply(job, service.name_for(job), outputs), headers=headers)
    )
