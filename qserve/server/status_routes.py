"""The routes that tell of the server: whether it works, what it serves, what it did."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from qserve import __version__
from qserve.server.errors import ApiError, engine_dead, json_response
from qserve.server.replies import model_card
from qserve.server.service import Service, service_of

router = APIRouter()
READ = ["GET", "HEAD"]


@router.api_route("/health", methods=READ)
async def health(request: Request) -> Response:
    """200 while the engine lives, else 503."""
    client = service_of(request).client
    return Response() if client.is_alive else engine_dead(client.is_restarting).response


@router.api_route("/ping", methods=[*READ, "POST"])
async def ping(request: Request) -> Response:
    """The same under the name that SageMaker asks for."""
    return await health(request)


@router.api_route("/ready", methods=READ)
async def ready(request: Request) -> Response:
    """200 while a request would be taken: the engine lives, and the server is not stopping."""
    service = service_of(request)
    if service.is_stopping():
        raise ApiError(503, "The server is stopping.")
    return await health(request)


@router.api_route("/version", methods=READ)
async def version(request: Request) -> Response:
    return json_response({"version": __version__})


@router.api_route("/load", methods=READ)
async def load(request: Request) -> Response:
    """How many outputs are under way: the measure that --max-num-queued-reqs limits."""
    num_outputs, _ = service_of(request).admission.held
    return json_response({"server_load": num_outputs})


@router.api_route("/metrics", methods=READ)
async def metrics(request: Request) -> Response:
    """What Prometheus collects; of a dead engine too."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST}
    return Response(service_of(request).metrics.page(), headers=headers)


@router.api_route("/v1/models", methods=READ)
async def models(request: Request) -> Response:
    service = service_of(request)
    cards = [_card(service, name) for name in (*service.model_names, *service.adapters.of_name)]
    return json_response({"object": "list", "data": cards})


@router.api_route("/v1/models/{name:path}", methods=READ)
async def model(request: Request, name: str) -> Response:
    service = service_of(request)
    service.model.check_name(name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> dict:
    parent = service.model_name if name in service.adapters.of_name else None
    return model_card(name, service.created, service.client.max_model_len, parent)
