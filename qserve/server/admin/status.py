"""Routes that report on the server: health, readiness, version, load, metrics."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from qserve import __version__
from qserve.server.http.errors import ApiError, engine_dead, json_response
from qserve.server.http.route_list import READ, RouteList
from qserve.server.service import service_of

routes = RouteList()


@routes.read("/health")
async def health(request: Request) -> Response:
    """200 while the engine is alive, else 503."""
    client = service_of(request).client
    return Response() if client.is_alive else engine_dead(client.is_restarting).response


@routes.route("/ping", (*READ, "POST"))
async def ping(request: Request) -> Response:
    """/health under SageMaker's name."""
    return await health(request)


@routes.read("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are accepted: the engine is alive and the server is not stopping."""
    service = service_of(request)
    if service.is_stopping():
        raise ApiError(503, "The server is stopping.")
    if service.is_refusing:
        raise ApiError(503, "The model is paused or asleep.")
    return await health(request)


@routes.read("/version")
async def version(request: Request) -> Response:
    return json_response({"version": __version__})


@routes.read("/load")
async def load(request: Request) -> Response:
    """Number of outputs running or queued, which --max-num-queued-reqs limits."""
    num_outputs, _ = service_of(request).admission.held
    return json_response({"server_load": num_outputs})


@routes.read("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics, also while the engine is dead."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST}
    return Response(service_of(request).metrics.page(), headers=headers)
