"""GET /v1/models: the names of the models and of the loaded adapters."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qserve.server.http.errors import json_response
from qserve.server.http.route_list import RouteList
from qserve.server.models.select import named_service
from qserve.server.service import Service, services_of

routes = RouteList()


@routes.read("/v1/models")
async def models(request: Request) -> Response:
    cards = [
        _card(service, name)
        for service in services_of(request)
        for name in (*service.model_names, *service.adapters.of_name)
    ]
    return json_response({"object": "list", "data": cards})


@routes.read("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    name = request.path_params["name"]
    service = named_service(services_of(request), name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    card = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "qserve",
        "max_model_len": service.client.max_model_len,
    }
    if name not in service.adapters.of_name:
        return card
    return card | {"root": name, "parent": service.model_name}
