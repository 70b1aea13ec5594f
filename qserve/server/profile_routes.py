"""POST /start_profile and /stop_profile, on a server with --profiler-config alone."""

import json

from starlette.requests import Request
from starlette.responses import Response

from formats.errors import InputError
from qserve.profile.profiler_config import ProfilerConfig
from qserve.server.errors import ApiError, engine_dead
from qserve.server.route_list import RouteList
from qserve.server.service import service_of

MOST_BYTES = 4096


def profile_routes(config: ProfilerConfig) -> RouteList:
    """Routes that record as `config` says. Both answer when it is done."""
    routes = RouteList()

    @routes.post("/start_profile")
    async def start_profile(request: Request) -> Response:
        data = b""
        async for piece in request.stream():
            data += piece
            if len(data) > MOST_BYTES:
                raise ApiError(413, f"expected at most {MOST_BYTES} bytes")
        try:
            body = json.loads(data) if data else {}
            if not isinstance(body, dict):
                raise InputError("body", "expected a JSON object")
            wanted = config.asked(body)
        except (ValueError, InputError) as error:
            raise ApiError(400, str(error)) from None
        return await _tell(request, wanted)

    @routes.post("/stop_profile")
    async def stop_profile(request: Request) -> Response:
        return await _tell(request, None)

    return routes


async def _tell(request: Request, config: ProfilerConfig | None) -> Response:
    client = service_of(request).client
    if not client.is_alive:
        raise engine_dead(client.is_restarting)
    problem = await client.profile(config)
    if problem:
        raise ApiError(409, problem)
    return Response()
