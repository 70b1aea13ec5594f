"""Routes of --enable-admin-routes: pause, sleep, new weights and their digests.

vLLM's routes take query parameters, SGLang's a JSON body; both names lead to the same commands.
Routes that would read pickled tensors are refused by name.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from formats.errors import InputError
from qserve.engine.control import commands
from qserve.engine.control.commands import AnyCommand, Outcome
from qserve.server.http.body import small_body
from qserve.server.http.errors import ApiError, engine_dead, json_response
from qserve.server.http.route_list import RouteList
from qserve.server.service import Service, service_of

MOST_BYTES = 65536  # of a body
BOOLS = {"true": True, "1": True, "false": False, "0": False}
# SGLang's modes of /pause_generation -> ours
SGLANG_MODES = {"abort": commands.ABORT, "retract": commands.KEEP, "in_place": commands.KEEP}
MOST_BYTES_OF_TENSORS = 2**25  # of a body that describes tensors, each in up to 1 KB
BY_FOLDER = (
    "share the tensors with POST /update_weights_from_ipc (qserve.training.send_weights), broadcast"
    " them (/init_weights_update_group), or POST /update_weights_from_disk"
)
# Routes of other servers that are not served -> what to do instead
NOT_HERE = {
    "/update_weights_from_tensor": BY_FOLDER,
    "/init_weight_transfer_engine": BY_FOLDER,
    "/update_weights": BY_FOLDER,
}
RELOAD = "reload_weights"  # the one method of /collective_rpc
DEFAULT_GROUP = "weight_update_group"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Body = TypeVar("Body", bound=msgspec.Struct)

routes = RouteList()


@routes.post("/pause")
async def pause(request: Request) -> Response:
    """Stop generation (vLLM): mode abort, wait or keep; clear_cache drops the prefix cache."""
    query = request.query_params
    await _operate(
        request,
        commands.PauseGeneration(
            mode=_mode(query), clear_cache=_flag(query, "clear_cache", default=True)
        ),
    )
    return json_response({"status": "paused"})


@routes.post("/pause_generation")
async def pause_generation(request: Request) -> Response:
    """Stop generation (SGLang): mode abort, retract or in_place."""
    body = await _body(request)
    mode = body.get("mode", "abort")
    if mode not in SGLANG_MODES:
        raise ApiError(400, f"mode: expected one of {', '.join(SGLANG_MODES)}.", "mode")
    command = commands.PauseGeneration(mode=SGLANG_MODES[mode], clear_cache=False)
    await _operate(request, command)
    return json_response({"status": "ok", "message": "Generation paused."})


@routes.post("/resume")
@routes.post("/continue_generation")
async def resume(request: Request) -> Response:
    """Continue generation."""
    await _operate(request, commands.ResumeGeneration())
    return json_response({"status": "resumed"})


@routes.read("/is_paused")
async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": _admin(request).client.state.is_paused})


@routes.post("/abort_requests")
@routes.post("/abort_request")
async def abort_requests(request: Request) -> Response:
    """End all requests; a single one ends when its client disconnects."""
    body = await _body(request)
    if any(body.get(name) for name in ("rid", "request_ids", "request_id")):
        raise ApiError(400, "Only all requests together can be aborted: send an empty body.")
    outcome = await _operate(request, commands.AbortAll())
    return json_response({"status": "aborted", "num_requests": outcome.num_requests})


@routes.post("/sleep")
async def sleep(request: Request) -> Response:
    """Give the device's memory back (vLLM): level 0, 1 or 2, and the mode of /pause."""
    query = request.query_params
    level = query.get("level", "1")
    if level not in map(str, commands.LEVELS):
        raise ApiError(400, f"level: expected 0, 1 or 2, found {level[:40]!r}.", "level")
    await _operate(request, commands.Sleep(level=int(level), mode=_mode(query)))
    return Response()


@routes.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Bring back what the tags name (vLLM): weights, kv_cache; default: all."""
    tags = request.query_params.getlist("tags")
    await _operate(request, commands.WakeUp(tags=tags or None))
    return Response()


@routes.read("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": _admin(request).client.state.is_sleeping})


@routes.post("/release_memory_occupation")
async def release_memory(request: Request) -> Response:
    """Sleep at level 1 (SGLang)."""
    tags = (await _body(request)).get("tags")
    if tags is not None and commands.WEIGHTS not in tags:
        raise ApiError(400, "tags: weights and KV pages sleep together; leave tags out.", "tags")
    await _operate(request, commands.Sleep(level=1))
    return json_response({})


@routes.post("/resume_memory_occupation")
async def resume_memory(request: Request) -> Response:
    """Wake up (SGLang)."""
    tags = (await _body(request)).get("tags")
    if tags is not None and not (
        isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
    ):
        raise ApiError(400, "tags: expected a list of names.", "tags")
    await _operate(request, commands.WakeUp(tags=tags))
    return json_response({})


@routes.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request) -> Response:
    """Replace the weights by those of a folder or hub name (SGLang's fields, and `mode`)."""
    body = await _body(request)
    if body.get("flush_cache") is False:
        raise ApiError(400, "flush_cache: new weights always drop the prefix cache.", "flush_cache")
    mode = commands.ABORT if body.get("abort_all_requests") is True else commands.WAIT
    mode = _mode({"mode": body.get("mode") or mode})
    version = body.get("weight_version")
    outcome = await _update(request, body.get("model_path"), version, mode)
    version = outcome.state.weight_version
    return json_response(
        {
            "success": True,
            "message": f"Succeeded to update model weights: version {version}.",
            "num_paused_requests": 0,
            "weight_version": version,
        }
    )


class SharedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /update_weights_from_ipc: tensors in memory that a trainer on this host shares."""

    tensors: list[commands.SharedTensor]
    is_last: bool = True  # False: a part; the engine copies it and waits for the last one
    is_first: bool = False  # drop parts that came before, of an update that did not end
    weight_version: str | int | None = None
    mode: str = commands.WAIT
    digests: bool = True  # compute them now; later they cannot be


@routes.post("/update_weights_from_ipc")
async def update_weights_from_ipc(request: Request) -> Response:
    """Replace the weights by tensors in shared memory; nothing is pickled."""
    body = await _decoded(request, SharedWeights)
    if not body.is_last:
        received = commands.ReceiveWeights(tensors=body.tensors, is_first=body.is_first)
        outcome = await _operate(request, received)
        return json_response({"success": True, "num_tensors": outcome.num_tensors})
    command = commands.UpdateWeights(
        tensors=body.tensors,
        is_first=body.is_first,
        version=_label(body.weight_version),
        mode=_mode({"mode": body.mode}),
        is_kept=False,
        digests=body.digests,
    )
    outcome = await _operate(request, command)
    return json_response({"success": True, "weight_version": outcome.state.weight_version})


class NewGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /init_weights_update_group, as in SGLang."""

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: int  # rank of the engine; the trainer is rank 0
    world_size: int
    group_name: Name = DEFAULT_GROUP
    backend: str = "nccl"
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 300.0  # seconds


class BroadcastPart(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /update_weights_from_distributed: SGLang's, and what follows `is_last`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: Name = DEFAULT_GROUP
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    is_last: bool | None = None  # None: if all tensors of the model's folder have come
    is_first: bool = False  # drop parts that came before, of an update that did not end
    mode: str | None = None
    digests: bool = True


@routes.post("/init_weights_update_group")
async def init_weights_update_group(request: Request) -> Response:
    """Join a trainer's process group; it answers when all members have joined."""
    body = await _decoded(request, NewGroup)
    command = commands.JoinWeightGroup(
        name=body.group_name,
        address=body.master_address,
        port=body.master_port,
        rank=body.rank_offset,
        world_size=body.world_size,
        backend=body.backend,
        timeout=body.timeout,
    )
    await _operate(request, command)
    return json_response({"success": True, "message": "Succeeded to initialize the group."})


@routes.post("/destroy_weights_update_group")
async def destroy_weights_update_group(request: Request) -> Response:
    name = (await _body(request)).get("group_name", DEFAULT_GROUP)
    await _operate(request, commands.LeaveWeightGroup(name=str(name)))
    return json_response({"success": True, "message": "Succeeded to destroy the group."})


@routes.post("/update_weights_from_distributed")
async def update_weights_from_distributed(request: Request) -> Response:
    """Receive tensors that the trainer broadcasts; the last ones replace the weights."""
    body = await _decoded(request, BroadcastPart)
    mode = body.mode or (commands.ABORT if body.abort_all_requests else commands.WAIT)
    mode = _mode({"mode": mode})
    broadcast = commands.BroadcastWeights(
        group=body.group_name, names=body.names, dtypes=body.dtypes, shapes=body.shapes
    )
    received = commands.ReceiveWeights(broadcast=broadcast, is_first=body.is_first)
    outcome = await _operate(request, received)
    message = f"Received {outcome.num_tensors} tensors; the weights are unchanged."
    if outcome.is_complete if body.is_last is None else body.is_last:
        command = commands.UpdateWeights(
            tensors=[],
            version=_label(body.weight_version),
            mode=mode,
            is_kept=False,
            digests=body.digests,
        )
        outcome = await _operate(request, command)
        message = "Succeeded to update model weights."
    version = outcome.state.weight_version
    return json_response({"success": True, "message": message, "weight_version": version})


@routes.post("/collective_rpc")
async def collective_rpc(request: Request) -> Response:
    """vLLM's reload_weights: from the folder `weights_path`, by default the model's."""
    body = await _body(request)
    method, given = body.get("method"), body.get("kwargs") or {}
    if method != RELOAD or not isinstance(given, dict):
        raise ApiError(400, f"method: expected {RELOAD}, found {str(method)[:60]!r}.", "method")
    path = given.get("weights_path") or service_of(request).tokenizer.folder
    await _update(request, path, None, commands.WAIT)
    return json_response({"results": [None]})


@routes.read("/weights/digest")
async def weights_digest(request: Request) -> Response:
    """Digest of each tensor and of all, as `formats.weight_digest` computes them."""
    outcome = await _operate(request, commands.GetDigests())
    return json_response(
        {
            "weight_version": outcome.state.weight_version,
            "total": outcome.total_digest,
            "tensors": outcome.digests,
            "schemes": outcome.schemes,
        }
    )


@routes.read("/weight_info")
@routes.read("/get_weight_version")
async def weight_version(request: Request) -> Response:
    return json_response({"weight_version": _admin(request).client.state.weight_version})


async def _refuse(request: Request) -> Response:
    _admin(request)
    path = request.url.path
    raise ApiError(501, f"{path} is not supported: {NOT_HERE[path]}.")


for _path in NOT_HERE:
    routes.post(_path)(_refuse)


async def _update(request: Request, path: object, version: object, mode: str) -> Outcome:
    service = _admin(request)
    if not isinstance(path, str) or not path:
        raise ApiError(400, "model_path: expected a model folder or a hub name.", "model_path")
    if version is not None and not isinstance(version, str | int):
        raise ApiError(400, "weight_version: expected a text or a number.", "weight_version")
    try:
        folder = await asyncio.to_thread(service.weights_folder, path)
    except InputError as error:
        raise ApiError(400, f"{error}.", "model_path") from None
    command = commands.UpdateWeights(folder=folder, version=_label(version), mode=mode)
    return await _operate(request, command)


def _label(version: str | int | None) -> str | None:
    return None if version is None else str(version)[:200]


def _admin(request: Request) -> Service:
    """The service, if the request's key is an operator's. Raises ApiError."""
    service = service_of(request)
    if service.keys is None or not service.keys.is_admin(request.scope):
        raise ApiError(403, "This route needs a key of --admin-api-key-file.")
    return service


async def _operate(request: Request, command: AnyCommand) -> Outcome:
    """Carry out a command, also if the client disconnects meanwhile. Raises ApiError."""
    client = _admin(request).client
    if not client.is_alive:
        raise engine_dead(client.is_restarting)
    outcome, problem = await asyncio.shield(client.operate(command))
    if problem and not client.is_alive:
        raise engine_dead(client.is_restarting)
    if problem:
        raise ApiError(400, f"{problem}.")
    return outcome


async def _decoded(request: Request, kind: type[Body]) -> Body:
    """A body that describes tensors or groups. Raises ApiError."""
    _admin(request)
    data = await small_body(request, MOST_BYTES_OF_TENSORS)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not what this route takes: {error}.") from None


async def _body(request: Request) -> dict[str, Any]:
    """JSON object of a request's body; empty if there is none. Raises ApiError."""
    _admin(request)
    data = await small_body(request, MOST_BYTES)
    try:
        body = json.loads(data) if data else {}
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "expected a JSON object")
    return body


def _mode(query: Mapping[str, Any]) -> str:
    mode = query.get("mode", commands.ABORT)
    if mode not in commands.MODES:
        known = ", ".join(commands.MODES)
        raise ApiError(400, f"mode: expected one of {known}, found {str(mode)[:40]!r}.", "mode")
    return mode


def _flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in BOOLS:
        raise ApiError(400, f"{name}: expected true or false, found {text[:40]!r}.", name)
    return BOOLS[text.lower()]
