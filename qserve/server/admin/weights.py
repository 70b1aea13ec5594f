"""Routes of --enable-admin-routes: update weights, and get their digests.

Names and bodies follow SGLang and vLLM. Pickled tensors are never unpickled: pickled_tensors.py
reads their memory handles, and refuses a message with anything else.
"""

import asyncio
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from formats.errors import InputError
from qserve.engine.control import commands
from qserve.engine.control.commands import WAIT, Outcome
from qserve.server.admin.access import body_of, decoded, mode_of, operate, operator_of
from qserve.server.admin.pickled_tensors import tensors_of
from qserve.server.http.errors import ApiError, json_response
from qserve.server.http.route_list import RouteList
from qserve.server.service import service_of

BY_FOLDER = (
    "share the tensors with POST /update_weights_from_ipc (qserve.training.send_weights), broadcast"
    " them (/init_weights_update_group), or POST /update_weights_from_disk"
)
# vLLM's routes that this server lacks -> what to do instead
NOT_HERE = {
    "/init_weight_transfer_engine": BY_FOLDER,
    "/start_weight_update": BY_FOLDER,
    "/update_weights": BY_FOLDER,
    "/finish_weight_update": BY_FOLDER,
}
RELOAD = "reload_weights"  # the only method that /collective_rpc accepts
DEFAULT_GROUP = "weight_update_group"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]

routes = RouteList()


@routes.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request) -> Response:
    """Replace the weights by those of a model folder or hub name. SGLang's fields, and `mode`."""
    body = await body_of(request)
    if body.get("flush_cache") is False:
        raise ApiError(
            400,
            "flush_cache: new weights always drop the prefix cache.",
            "Leave flush_cache out.",
            "flush_cache",
        )
    mode = commands.ABORT if body.get("abort_all_requests") is True else WAIT
    mode = mode_of({"mode": body.get("mode") or mode})
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
    """Body of /update_weights_from_ipc: tensors in shared memory of a trainer on this host."""

    tensors: list[commands.SharedTensor]
    is_last: bool = True  # False: more tensors follow; the engine copies these and waits
    is_first: bool = False  # drop tensors of an earlier update that was not completed
    weight_version: str | int | None = None
    mode: str = WAIT
    digests: bool = True  # compute digests now; the tensors cannot be read again later


@routes.post("/update_weights_from_ipc")
async def update_weights_from_ipc(request: Request) -> Response:
    """Replace the weights by tensors in shared memory; nothing is pickled."""
    body = await decoded(request, SharedWeights)
    if not body.is_last:
        received = commands.ReceiveWeights(tensors=body.tensors, is_first=body.is_first)
        outcome = await operate(request, received)
        return json_response({"success": True, "num_tensors": outcome.num_tensors})
    command = commands.UpdateWeights(
        tensors=body.tensors,
        is_first=body.is_first,
        version=_label(body.weight_version),
        mode=mode_of({"mode": body.mode}),
        is_kept=False,
        digests=body.digests,
    )
    outcome = await operate(request, command)
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


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields of bodies with tensors: SGLang's, then our own from `is_last` on."""

    weight_version: str | int | None = None
    abort_all_requests: bool = False
    is_last: bool | None = None  # None: true once all tensors of the model have arrived
    is_first: bool = False  # drop tensors of an earlier update that was not completed
    mode: str | None = None
    digests: bool = True


class BroadcastPart(Part, frozen=True, kw_only=True):
    """Body of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: Name = DEFAULT_GROUP


class SerializedPart(Part, frozen=True, kw_only=True):
    """Body of /update_weights_from_tensor. New weights always drop the prefix cache."""

    serialized_named_tensors: Annotated[list[str], msgspec.Meta(min_length=1)]  # one per rank
    load_format: str | None = None
    selector: str = "all"


@routes.post("/init_weights_update_group")
async def init_weights_update_group(request: Request) -> Response:
    """Join a trainer's process group. The reply comes when all members have joined."""
    body = await decoded(request, NewGroup)
    command = commands.JoinWeightGroup(
        name=body.group_name,
        address=body.master_address,
        port=body.master_port,
        rank=body.rank_offset,
        world_size=body.world_size,
        backend=body.backend,
        timeout=body.timeout,
    )
    await operate(request, command)
    return json_response({"success": True, "message": "Succeeded to initialize the group."})


@routes.post("/destroy_weights_update_group")
async def destroy_weights_update_group(request: Request) -> Response:
    name = (await body_of(request)).get("group_name", DEFAULT_GROUP)
    await operate(request, commands.LeaveWeightGroup(name=str(name)))
    return json_response({"success": True, "message": "Succeeded to destroy the group."})


@routes.post("/update_weights_from_distributed")
async def update_weights_from_distributed(request: Request) -> Response:
    """Receive tensors that the trainer broadcasts; with the last of them replace the weights."""
    body = await decoded(request, BroadcastPart)
    broadcast = commands.BroadcastWeights(
        group=body.group_name, names=body.names, dtypes=body.dtypes, shapes=body.shapes
    )
    received = commands.ReceiveWeights(broadcast=broadcast, is_first=body.is_first)
    return await _take_part(request, received, body)


@routes.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: Request) -> Response:
    """Copy tensors that a trainer on this host shares; with the last of them replace the weights.

    Each rank's message has whole tensors, so only the first message is read.
    """
    body = await decoded(request, SerializedPart)
    if body.selector == "draft":
        raise ApiError(
            400,
            "selector: a draft model's weights cannot be replaced.",
            "Send the main model's weights, without selector.",
            "selector",
        )
    try:
        tensors = await asyncio.to_thread(
            tensors_of, body.serialized_named_tensors[0], body.load_format
        )
    except InputError as error:
        raise ApiError.relayed(400, f"{error}.", error.subject) from None
    received = commands.ReceiveWeights(tensors=tensors, is_first=body.is_first)
    return await _take_part(request, received, body)


async def _take_part(request: Request, received: commands.ReceiveWeights, body: "Part") -> Response:
    """Receive some tensors of an update; after the last ones, replace the weights."""
    mode = mode_of({"mode": body.mode or (commands.ABORT if body.abort_all_requests else WAIT)})
    outcome = await operate(request, received)
    message = f"Received {outcome.num_tensors} tensors; the weights are unchanged."
    if outcome.is_complete if body.is_last is None else body.is_last:
        command = commands.UpdateWeights(
            tensors=[],
            version=_label(body.weight_version),
            mode=mode,
            is_kept=False,
            digests=body.digests,
        )
        outcome = await operate(request, command)
        message = "Succeeded to update model weights."
    version = outcome.state.weight_version
    return json_response({"success": True, "message": message, "weight_version": version})


@routes.post("/collective_rpc")
async def collective_rpc(request: Request) -> Response:
    """Run vLLM's reload_weights: from the folder `weights_path`, by default the model's folder."""
    body = await body_of(request)
    method, given = body.get("method"), body.get("kwargs") or {}
    if method != RELOAD or not isinstance(given, dict):
        raise ApiError(
            400,
            f"method: expected {RELOAD}, found {str(method)[:60]!r}.",
            "Use this method.",
            "method",
        )
    path = given.get("weights_path") or service_of(request).tokenizer.folder
    await _update(request, path, None, WAIT)
    return json_response({"results": [None]})


@routes.read("/weights/digest")
async def weights_digest(request: Request) -> Response:
    """Return the `formats.weight_digest` of each tensor, and a digest of all."""
    outcome = await operate(request, commands.GetDigests())
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
    return json_response({"weight_version": operator_of(request).client.state.weight_version})


async def _refuse(request: Request) -> Response:
    operator_of(request)
    path = request.url.path
    raise ApiError(501, f"{path} is not supported:", f"{NOT_HERE[path]}.")


for _path in NOT_HERE:
    routes.post(_path)(_refuse)


async def _update(request: Request, path: object, version: object, mode: str) -> Outcome:
    service = operator_of(request)
    if not isinstance(path, str) or not path:
        raise ApiError(
            400,
            "model_path: expected a model folder or a hub name.",
            "Give one of the two.",
            "model_path",
        )
    if version is not None and not isinstance(version, str | int):
        raise ApiError(
            400,
            "weight_version: expected a text or a number.",
            "Give one of the two, or leave weight_version out.",
            "weight_version",
        )
    try:
        folder = await asyncio.to_thread(service.weights_folder, path)
    except InputError as error:
        raise ApiError.relayed(400, f"{error}.", "model_path") from None
    command = commands.UpdateWeights(folder=folder, version=_label(version), mode=mode)
    return await operate(request, command)


def _label(version: str | int | None) -> str | None:
    return None if version is None else str(version)[:200]
