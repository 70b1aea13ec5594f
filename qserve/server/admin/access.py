"""Access of operators' routes to the engine: keys, bodies, parameters, commands."""

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

MOST_BYTES = 65536  # of a body
MOST_BYTES_OF_TENSORS = 2**25  # of a body that describes tensors, each in up to 1 KB
BOOLS = {"true": True, "1": True, "false": False, "0": False}
WAITS = "wait_for_inflight_requests"
Body = TypeVar("Body", bound=msgspec.Struct)


def operator_of(request: Request) -> Service:
    """The service, if the request's key is an operator's. Raises ApiError."""
    service = service_of(request)
    if service.keys is None or not service.keys.is_admin(request.scope):
        raise ApiError(403, "This route needs a key of --admin-api-key-file.")
    return service


async def operate(request: Request, command: AnyCommand) -> Outcome:
    """Carry out a command, also if the client disconnects meanwhile. Raises ApiError."""
    client = operator_of(request).client
    if not client.is_alive:
        raise engine_dead(client.is_restarting)
    outcome, problem = await asyncio.shield(client.operate(command))
    if problem and not client.is_alive:
        raise engine_dead(client.is_restarting)
    if problem:
        raise ApiError(400, f"{problem}.")
    return outcome


async def decoded(request: Request, kind: type[Body]) -> Body:
    """A body that describes tensors or groups. Raises ApiError."""
    operator_of(request)
    data = await small_body(request, MOST_BYTES_OF_TENSORS)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not what this route takes: {error}.") from None


async def body_of(request: Request) -> dict[str, Any]:
    """JSON object of a request's body; empty if there is none. Raises ApiError."""
    operator_of(request)
    data = await small_body(request, MOST_BYTES)
    try:
        body = json.loads(data) if data else {}
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "expected a JSON object")
    return body


def check_parameters(query: Mapping[str, str], *names: str) -> None:
    """Refuse unknown parameters: a misspelt mode would end requests. Raises ApiError."""
    known = (*names, "model")
    for name in query:
        if name not in known:
            text = f"{name[:40]}: unknown parameter; expected one of {', '.join(known)}."
            raise ApiError(400, text, name)


def mode_of(query: Mapping[str, Any]) -> str:
    """The mode of a pause; vLLM's older wait_for_inflight_requests means wait."""
    default = commands.ABORT
    if flag_of(query, WAITS, default=False):
        default = commands.WAIT
    mode = query.get("mode", default)
    if mode not in commands.MODES:
        known = ", ".join(commands.MODES)
        raise ApiError(400, f"mode: expected one of {known}, found {str(mode)[:40]!r}.", "mode")
    return mode


def flag_of(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in BOOLS:
        raise ApiError(400, f"{name}: expected true or false, found {text[:40]!r}.", name)
    return BOOLS[text.lower()]
