"""POST /tokenize and /detokenize."""

from starlette.requests import Request
from starlette.responses import Response

from qserve.server.http.clients import client_key
from qserve.server.http.large_response import LargeResponse
from qserve.server.http.route_list import RouteList
from qserve.server.openai.answer import prepare_body
from qserve.server.service import service_of

routes = RouteList()


@routes.post("/tokenize")
async def tokenize(request: Request) -> Response:
    return await _answer(request, "tokenize")


@routes.post("/detokenize")
async def detokenize(request: Request) -> Response:
    return await _answer(request, "detokenize")


async def _answer(request: Request, route: str) -> Response:
    service = service_of(request)
    content = await prepare_body(request, service, client_key(request.scope), route)
    return LargeResponse([content])
