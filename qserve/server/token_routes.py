"""The routes /tokenize and /detokenize: text to tokens and back, as the other routes do it."""

from starlette.requests import Request
from starlette.responses import Response

from qserve.server.client_key import client_key
from qserve.server.errors import json_response
from qserve.server.job import Job
from qserve.server.prepared import prepared_job
from qserve.server.route_list import RouteList
from qserve.server.service import Service, service_of

routes = RouteList()


@routes.post("/tokenize")
async def tokenize(request: Request) -> Response:
    service, job = await _job(request, "tokenize")
    (tokens,) = job.prompts
    reply = {
        "count": len(tokens),
        "max_model_len": service.client.max_model_len,
        "tokens": tokens,
        "token_strs": job.echoed or None,
    }
    return json_response(reply)


@routes.post("/detokenize")
async def detokenize(request: Request) -> Response:
    _, job = await _job(request, "detokenize")
    return json_response({"prompt": job.echoed[0]})


async def _job(request: Request, route: str) -> tuple[Service, Job]:
    service = service_of(request)
    return service, await prepared_job(request, service, client_key(request.scope), route)
