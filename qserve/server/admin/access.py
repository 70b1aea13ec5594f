"""Helpers of the operator routes: check the key, read body and parameters, run commands."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from qserve.engine.control import commands
from qserve.engine.control.commands import AnyCommand, Outcome
from qserve.server.http.body import small_body
from qserve.server.http.errors import ApiError, engine_dead
from qserve.server.service import Service, service_of

MAX_BYTES = 65536  # maximum size of a body
MAX_BYTES_OF_TENSORS = 2**25  # the same for a body that describes tensors, up to 1 KB per tensor
BOOLS = {"true": True, "1": True, "false": False, "0": False}
WAITS = "wait_for_inflight_requests"
Body = TypeVar("Body", bound=msgspec.Struct)


def operator_of(request: Request) -> Service:
    """Return the service. Raises ApiError(403) unless the request has an operator's key."""
    service = service_of(request)
    if service.keys is None or not service.keys.is_admin(request.scope):
        raise ApiError(
            403,
            "This route needs a key of --admin-api-key-file.",
            "Send one in the header Authorization: Bearer KEY.",
        )
    return service


async def operate(request: Request, command: AnyCommand) -> Outcome:
    """Run a command in the engine to its end, even if the client disconnects. Raises ApiError."""
    client = operator_of(request).client
    if not client.is_alive:
        raise engine_dead(client.is_restarting)
    outcome, problem = await asyncio.shield(client.operate(command))
    if problem and not client.is_alive:
        raise engine_dead(client.is_restarting)
    if problem:
        raise ApiError.relayed(400, f"{problem}.")
    return outcome


async def decoded(request: Request, kind: type[Body]) -> Body:
    """Read a body that describes tensors or process groups. Raises ApiError."""
    operator_of(request)
    data = await small_body(request, MAX_BYTES_OF_TENSORS)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(
            400, f"The body does not fit this route: {error}.", "Correct the body."
        ) from None


async def body_of(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request's body; {} if there is no body. Raises ApiError."""
    operator_of(request)
    data = await small_body(request, MAX_BYTES)
    try:
        body = json.loads(data) if data else {}
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", "Correct the body.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body: expected a JSON object.", "Put names and values in {...}.")
    return body


def check_parameters(query: Mapping[str, str], *names: str) -> None:
    """Raise ApiError for unknown query parameters: with a misspelt `mode`, requests would abort."""
    known = (*names, "model")
    for name in query:
        if name not in known:
            text = f"{name[:40]}: unknown parameter; expected one of {', '.join(known)}."
            raise ApiError(400, text, "Correct the name, or leave it out.", name)


def mode_of(query: Mapping[str, Any]) -> str:
    """Return the mode of a pause. vLLM's older wait_for_inflight_requests=true means "wait"."""
    default = commands.ABORT
    if flag_of(query, WAITS, default=False):
        default = commands.WAIT
    mode = query.get("mode", default)
    if mode not in commands.MODES:
        known = ", ".join(commands.MODES)
        raise ApiError(
            400,
            f"mode: expected one of {known}, found {str(mode)[:40]!r}.",
            "Use one of these.",
            "mode",
        )
    return mode


def flag_of(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in BOOLS:
        raise ApiError(
            400,
            f"{name}: expected true or false, found {text[:40]!r}.",
            f"Give one of the two, or leave {name} out.",
            name,
        )
    return BOOLS[text.lower()]
