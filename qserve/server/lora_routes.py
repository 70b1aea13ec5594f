"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with --lora-folder alone."""

from starlette.requests import Request
from starlette.responses import Response

from formats.errors import InputError
from qserve.server.adapters import MAX_LOADED
from qserve.server.body import Body as RequestBody
from qserve.server.client_key import client_key
from qserve.server.errors import ApiError, engine_dead
from qserve.server.lora_protocol import LoadAdapterRequest, UnloadAdapterRequest
from qserve.server.protocol import AnyBody, read
from qserve.server.route_list import RouteList
from qserve.server.service import Service, service_of

routes = RouteList()


@routes.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Answers when the adapter has been read and checked; steps go on meanwhile."""
    service = service_of(request)
    asked = await _read(request, service, LoadAdapterRequest)
    adapters, name = service.adapters, asked.lora_name
    async with adapters.changing:
        try:
            adapters.check_free(name, service.model_names)
            lora = adapters.next_request(name, adapters.path_of(asked.lora_path))
        except InputError as error:
            raise ApiError(404 if "no such adapter" in str(error) else 400, f"{error}.") from None
        if name in adapters.of_name and not asked.load_inplace:
            raise ApiError(400, f"The adapter {name!r} is loaded already.", "lora_name")
        if len(adapters.of_name) >= MAX_LOADED and name not in adapters.of_name:
            raise ApiError(400, f"{MAX_LOADED} adapters are loaded. Unload one first.")
        problem = await service.client.load_adapter(lora)
        if problem:
            raise ApiError(400, f"{problem.replace(adapters.folder, '')}.", "lora_path")
        adapters.add(lora)
    return Response(f"Success: LoRA adapter '{name}' added successfully.")


@routes.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Requests that have the adapter keep it to their end."""
    service = service_of(request)
    asked = await _read(request, service, UnloadAdapterRequest)
    name = asked.lora_name
    async with service.adapters.changing:
        if service.adapters.of_name.pop(name, None) is None:
            raise ApiError(404, f"The adapter {name!r} is not loaded.", "lora_name")
        service.client.unload_adapter(name)
    return Response(f"Success: LoRA adapter '{name}' removed successfully.")


async def _read(request: Request, service: Service, kind: type[AnyBody]) -> AnyBody:
    if service.adapters.folder is None:
        raise ApiError(404, "This server was started without --lora-folder.")
    with RequestBody(request, client_key(request.scope), service) as body:
        content = await body.read()
    if not service.client.is_alive:
        raise engine_dead(service.client.is_restarting)
    return read(content, kind)
