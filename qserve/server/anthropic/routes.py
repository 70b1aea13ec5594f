"""POST /v1/messages and /v1/messages/count_tokens, and GET /v1/models in Anthropic's form."""

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from qserve.server.anthropic.errors import VERSION_HEADER, error_event
from qserve.server.anthropic.models import model_info, model_list
from qserve.server.anthropic.reply import PING, MessageReply
from qserve.server.http.clients import client_key
from qserve.server.http.errors import json_response
from qserve.server.http.event_stream import EventStream
from qserve.server.http.large_response import LargeResponse
from qserve.server.http.route_list import READ, CountedRoute, RouteList
from qserve.server.openai.answer import PreparedRequest, prepare, prepare_body
from qserve.server.service import service_of

routes = RouteList()


@routes.post("/v1/messages")
async def messages(request: Request) -> Response:
    prepared = await prepare(request, "messages")
    reply = MessageReply(**prepared.reply_fields)
    if prepared.job.streams:
        return EventStream(
            _events(prepared, reply),
            prepared.headers,
            are_named=True,
            ping=PING,
            error=functools.partial(error_event, request_id=prepared.job.name),
        )
    return await prepared.whole(reply.whole)


async def _events(prepared: PreparedRequest, reply: MessageReply) -> AsyncGenerator[dict, None]:
    async with aclosing(prepared.deltas()) as deltas, aclosing(reply.events(deltas)) as events:
        async for event in events:
            yield event


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation, in a worker process."""
    service = service_of(request)
    content = await prepare_body(request, service, client_key(request.scope), "count_tokens")
    return LargeResponse([content])


class AnthropicRoute(CountedRoute):
    """A route that matches only requests with the header anthropic-version."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and any(name == VERSION_HEADER for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}


async def models(request: Request) -> Response:
    return json_response(model_list(service_of(request), dict(request.query_params)))


async def model(request: Request) -> Response:
    return json_response(model_info(service_of(request), request.path_params["name"]))


routes += [
    AnthropicRoute("/v1/models", models, methods=READ),
    AnthropicRoute("/v1/models/{name:path}", model, methods=READ),
]
