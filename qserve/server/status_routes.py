"""The routes that tell of the server: whether it works, what it serves, what it did."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from qserve import __version__
from qserve.server.errors import ApiError, engine_dead, json_response
from qserve.server.replies import model_card
from qserve.server.route_list import READ, RouteList
from qserve.server.service import Service, service_of

routes = RouteList()


@routes.read("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives, else 503."""
    client = service_of(request).client
    return Response() if client.is_alive else engine_dead(client.is_restarting).response


@routes.route("/ping", (*READ, "POST"))
async def ping(request: Request) -> Response:
    """The same under the name that SageMaker asks for."""
    return await health(request)


@routes.read("/ready")
async def ready(request: Request) -> Response:
    """200 while a request would be taken: the engine lives, and the server is not stopping."""
    service = service_of(request)
    if service.is_stopping():
        raise ApiError(503, "The server is stopping.")
    return await health(request)


@routes.read("/version")
async def version(request: Request) -> Response:
    return json_response({"version": __version__})


@routes.read("/load")
async def load(request: Request) -> Response:
    """How many outputs are under way: the measure that --max-num-queued-reqs limits."""
    num_outputs, _ = service_of(request).admission.held
    return json_response({"server_load": num_outputs})


@routes.read("/metrics")
async def metrics(request: Request) -> Response:
    """What Prometheus collects; of a dead engine too."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST}
    return Response(service_of(request).metrics.page(), headers=headers)


@routes.read("/v1/models")
async def models(request: Request) -> Response:
    service = service_of(request)
    cards = [_card(service, name) for name in (*service.model_names, *service.adapters.of_name)]
    return json_response({"object": "list", "data": cards})


@routes.read("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    service, name = service_of(request), request.path_params["name"]
    service.model.check_name(name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> dict:
    parent = service.model_name if name in service.adapters.of_name else None
    return model_card(name, service.created, service.client.max_model_len, parent)
