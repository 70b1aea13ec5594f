"""Routes of --enable-admin-routes: pause, abort, sleep, wake up, and the engine's state.

The routes of vLLM take query parameters, those of SGLang a JSON body. Both run the same commands.
"""

from starlette.requests import Request
from starlette.responses import Response

from qserve.engine.control import commands
from qserve.server.admin.access import (
    WAITS,
    body_of,
    check_parameters,
    flag_of,
    mode_of,
    operate,
    operator_of,
)
from qserve.server.http.errors import ApiError, engine_dead, json_response
from qserve.server.http.route_list import RouteList

# SGLang's mode of /pause_generation -> mode of the engine
SGLANG_MODES = {"abort": commands.ABORT, "retract": commands.KEEP, "in_place": commands.KEEP}

routes = RouteList()


@routes.post("/pause")
async def pause(request: Request) -> Response:
    """Stop generation (vLLM): mode abort, wait or keep; clear_cache drops the prefix cache."""
    query = request.query_params
    check_parameters(query, "mode", WAITS, "clear_cache")
    await operate(
        request,
        commands.PauseGeneration(
            mode=mode_of(query), clear_cache=flag_of(query, "clear_cache", default=True)
        ),
    )
    return json_response({"status": "paused"})


@routes.post("/pause_generation")
async def pause_generation(request: Request) -> Response:
    """Stop generation (SGLang): mode abort, retract or in_place."""
    body = await body_of(request)
    mode = body.get("mode", "abort")
    if mode not in SGLANG_MODES:
        raise ApiError(
            400, f"mode: expected one of {', '.join(SGLANG_MODES)}.", "Use one of these.", "mode"
        )
    command = commands.PauseGeneration(mode=SGLANG_MODES[mode], clear_cache=False)
    await operate(request, command)
    return json_response({"status": "ok", "message": "Generation paused."})


@routes.post("/resume")
@routes.post("/continue_generation")
async def resume(request: Request) -> Response:
    """Continue generation."""
    await operate(request, commands.ResumeGeneration())
    return json_response({"status": "resumed"})


@routes.read("/is_paused")
async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": operator_of(request).client.state.is_paused})


@routes.post("/abort_requests")
@routes.post("/abort_request")
async def abort_requests(request: Request) -> Response:
    """Abort all requests. There is no route for one request: its client disconnects instead."""
    body = await body_of(request)
    if any(body.get(name) for name in ("rid", "request_ids", "request_id")):
        raise ApiError(400, "Only all requests together can be aborted.", "Send an empty body.")
    outcome = await operate(request, commands.AbortAll())
    return json_response({"status": "aborted", "num_requests": outcome.num_requests})


@routes.post("/sleep")
async def sleep(request: Request) -> Response:
    """Free device memory (vLLM): `level` 0, 1 or 2, `mode` as for /pause."""
    query = request.query_params
    check_parameters(query, "level", "mode", WAITS)
    level = query.get("level", "1")
    if level not in map(str, commands.LEVELS):
        raise ApiError(
            400, f"level: expected 0, 1 or 2, found {level[:40]!r}.", "Use one of these.", "level"
        )
    await operate(request, commands.Sleep(level=int(level), mode=mode_of(query)))
    return Response()


@routes.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Restore the `tags` weights and kv_cache, by default everything (vLLM)."""
    check_parameters(request.query_params, "tags")
    tags = request.query_params.getlist("tags")
    await operate(request, commands.WakeUp(tags=tags or None))
    return Response()


@routes.read("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": operator_of(request).client.state.is_sleeping})


@routes.post("/release_memory_occupation")
async def release_memory(request: Request) -> Response:
    """Sleep at level 1 (SGLang)."""
    tags = (await body_of(request)).get("tags")
    if tags is not None and commands.WEIGHTS not in tags:
        raise ApiError(400, "tags: weights and KV pages sleep together.", "Leave tags out.", "tags")
    await operate(request, commands.Sleep(level=1))
    return json_response({})


@routes.post("/resume_memory_occupation")
async def resume_memory(request: Request) -> Response:
    """Wake up (SGLang)."""
    tags = (await body_of(request)).get("tags")
    if tags is not None and not (
        isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
    ):
        raise ApiError(400, "tags: expected a list of names.", "Put the names in [...].", "tags")
    await operate(request, commands.WakeUp(tags=tags))
    return json_response({})


@routes.read("/flush_cache")
@routes.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache (SGLang)."""
    client = operator_of(request).client
    if not client.is_alive:
        raise engine_dead(client.is_restarting)
    client.reset_prefix_cache()
    return Response("The prefix cache is empty.\n", media_type="text/plain")


@routes.read("/get_world_size")
async def world_size(request: Request) -> Response:
    """Return the number of engines (vLLM). An engine is one rank of a trainer's weight group."""
    return json_response({"world_size": operator_of(request).num_engines})


@routes.read("/server_info")
async def server_info(request: Request) -> Response:
    """Return the fields of vLLM's reply that trainers read. There is no weight-transfer engine."""
    service = operator_of(request)
    state = service.client.state
    return json_response(
        {
            "vllm_config": {"weight_transfer_config": None},
            "model": service.model_name,
            "world_size": service.num_engines,
            "weight_version": state.weight_version,
        }
    )
