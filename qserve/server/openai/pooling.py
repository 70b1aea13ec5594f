"""Routes for embeddings, pooling, classification, scores and ranking."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qserve.server.http.route_list import RouteList
from qserve.server.openai import pooling_replies
from qserve.server.openai.answer import prepare
from qserve.server.openai.generation import Output
from qserve.server.requests.job import Job

routes = RouteList()


@routes.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    return await _answer(request, "embeddings", pooling_replies.embeddings)


@routes.post("/v2/embed")
async def embed(request: Request) -> Response:
    """Reply in the form of Cohere's embedding endpoint."""
    return await _answer(request, "embed", pooling_replies.embed)


@routes.post("/classify")
@routes.post("/v1/classify")
async def classify(request: Request) -> Response:
    return await _answer(request, "classify", pooling_replies.classes)


@routes.post("/pooling")
async def pooling(request: Request) -> Response:
    return await _answer(request, "pooling", pooling_replies.pooling)


@routes.post("/score")
@routes.post("/v1/score")
async def score(request: Request) -> Response:
    return await _answer(request, "score", pooling_replies.scores)


@routes.post("/rerank")
@routes.post("/v1/rerank")
@routes.post("/v2/rerank")
async def rerank(request: Request) -> Response:
    return await _answer(request, "rerank", pooling_replies.ranking)


async def _answer(
    request: Request,
    route: str,
    reply: Callable[[Job, str, list[Output]], dict[str, Any]],
) -> Response:
    prepared = await prepare(request, route)
    model = prepared.service.name_for(prepared.job)
    return await prepared.whole(lambda outputs: reply(prepared.job, model, outputs))
