"""POST /reset_prefix_cache; with --profiler-config also POST /start_profile and /stop_profile."""

import json

from starlette.requests import Request
from starlette.responses import Response

from formats.errors import InputError
from qserve.profile.profiler_config import ProfilerConfig
from qserve.server.http.body import small_body
from qserve.server.http.errors import ApiError, engine_dead, json_response
from qserve.server.http.route_list import RouteList
from qserve.server.service import service_of

MAX_BYTES = 4096

routes = RouteList()


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache."""
    service = service_of(request)
    is_operator = (
        service.has_admin_routes
        and service.keys is not None
        and service.keys.is_admin(request.scope)
    )
    if not service.resets_cache and not is_operator:
        raise ApiError(
            404,
            "This server was started without --enable-cache-reset.",
            "Restart it with this flag.",
        )
    if not service.client.is_alive:
        raise engine_dead(service.client.is_restarting)
    service.client.reset_prefix_cache()
    return json_response({"success": True})


def profile_routes(config: ProfilerConfig) -> RouteList:
    """Return the routes that start and stop a recording. They reply when this is done."""
    routes = RouteList()

    @routes.post("/start_profile")
    async def start_profile(request: Request) -> Response:
        data = await small_body(request, MAX_BYTES)
        try:
            body = json.loads(data) if data else {}
            if not isinstance(body, dict):
                raise InputError(
                    "body",
                    f"expected a JSON object, found {type(body).__name__}",
                    "send {}, or no body",
                )
            wanted = config.asked(body)
        except InputError as error:
            raise ApiError.relayed(400, f"{error}.") from None
        except ValueError as error:
            problem = f"The body is not valid JSON: {error}."
            raise ApiError(400, problem, "Correct it, or send no body.") from None
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
        raise ApiError.relayed(409, problem)
    return Response()
