"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter. Field names follow vLLM's.

Without --lora-folder the routes answer 404.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from formats.errors import InputError
from qserve.lora.request import MAX_NAME
from qserve.server.adapters import MAX_LOADED
from qserve.server.http.body import Body as RequestBody
from qserve.server.http.clients import client_key
from qserve.server.http.errors import ApiError, engine_dead
from qserve.server.http.event_stream import while_connected
from qserve.server.http.route_list import RouteList
from qserve.server.requests.protocol import AnyBody, Body, read
from qserve.server.service import Service, service_of

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class LoadAdapterRequest(Body):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Name  # name of a subfolder of --lora-folder
    load_inplace: bool | None = None  # replace a loaded adapter of this name


class UnloadAdapterRequest(Body):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None  # ignored: the name is enough


routes = RouteList()


@routes.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter. The reply comes once the adapter is loaded; engine steps continue.

    If the client disconnects, the load is cancelled and the next waiting client has its turn.
    """
    service = service_of(request)
    asked = await _read(request, service, LoadAdapterRequest)
    return await while_connected(request.receive, _load(request, service, asked))


async def _load(request: Request, service: Service, asked: LoadAdapterRequest) -> Response:
    adapters, name = service.adapters, asked.lora_name
    async with _turn(request, service):
        try:
            adapters.check_free(name, service.model_names)
            lora = adapters.next_request(name, adapters.path_of(asked.lora_path))
        except InputError as error:
            raise ApiError.relayed(
                404 if "no such adapter" in str(error) else 400, f"{error}."
            ) from None
        if name in adapters.of_name and not asked.load_inplace:
            raise ApiError(
                400,
                f"The adapter {name!r} is loaded already.",
                "Set load_inplace: true to replace it.",
                "lora_name",
            )
        if len(adapters.of_name) >= MAX_LOADED and name not in adapters.of_name:
            raise ApiError(400, f"{MAX_LOADED} adapters are loaded.", "Unload one first.")
        problem = await service.client.load_adapter(lora)
        if problem:
            # Paths in the reply begin below --lora-folder.
            raise ApiError.relayed(
                400, f"{problem.replace(f'{adapters.folder}/', '')}.", "lora_path"
            )
        adapters.add(lora)
    return Response(f"Success: LoRA adapter '{name}' added successfully.")


@routes.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter. Running requests keep it until they finish."""
    service = service_of(request)
    asked = await _read(request, service, UnloadAdapterRequest)
    name = asked.lora_name
    async with _turn(request, service):
        if service.adapters.of_name.pop(name, None) is None:
            raise ApiError(
                404,
                f"The adapter {name!r} is not loaded.",
                "GET /v1/models lists the adapters.",
                "lora_name",
            )
        service.client.unload_adapter(name)
    return Response(f"Success: LoRA adapter '{name}' removed successfully.")


@asynccontextmanager
async def _turn(request: Request, service: Service) -> AsyncIterator[None]:
    """Hold the lock for changing adapters. Clients get it in turn."""
    client = client_key(request.scope)
    await service.adapters.turns.take(client)
    try:
        yield
    finally:
        service.adapters.turns.give_back(client)


async def _read(request: Request, service: Service, kind: type[AnyBody]) -> AnyBody:
    if service.adapters.folder is None:
        raise ApiError(
            404, "This server was started without --lora-folder.", "Restart it with this flag."
        )
    with RequestBody(request, client_key(request.scope), service) as body:
        content = await body.read()
    if not service.client.is_alive:
        raise engine_dead(service.client.is_restarting)
    return read(content, kind)
