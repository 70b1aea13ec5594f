"""Routes that report on the server: health, readiness, version, load, metrics."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from qserve import __version__
from qserve.server.http.errors import ApiError, engine_dead, json_response
from qserve.server.http.route_list import READ, RouteList
from qserve.server.observability.metrics_pages import join_pages
from qserve.server.service import services_of

routes = RouteList()


@routes.read("/health")
async def health(request: Request) -> Response:
    """Reply 200 while all engines are alive, else 503."""
    for service in services_of(request):
        if not service.client.is_alive:
            return engine_dead(service.client.is_restarting).response
    return Response()


@routes.route("/ping", (*READ, "POST"))
async def ping(request: Request) -> Response:
    """Reply as /health does. SageMaker uses this name."""
    return await health(request)


@routes.read("/ready")
async def ready(request: Request) -> Response:
    """Reply 200 while the server accepts requests: engine alive, not paused, not stopping."""
    for service in services_of(request):
        if service.is_stopping():
            raise ApiError(503, "The server is stopping.", "Try again later.")
        if service.is_refusing:
            raise ApiError(
                503, f"The model {service.model_name} is paused or asleep.", "Try again later."
            )
    return await health(request)


@routes.read("/version")
async def version(request: Request) -> Response:
    return json_response({"version": __version__})


@routes.read("/load")
async def load(request: Request) -> Response:
    """Return the number of running and queued outputs, which --max-num-queued-reqs limits."""
    held = [service.admission.held for service in services_of(request)]
    return json_response({"server_load": sum(num_outputs for num_outputs, _ in held)})


@routes.read("/metrics")
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics, also while the engine is dead."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST}
    pages = {each.model_name: each.metrics.page() for each in services_of(request)}
    if len(pages) == 1:
        return Response(*pages.values(), headers=headers)
    texts = {name: page.decode() for name, page in pages.items()}
    return Response(join_pages(texts, "model_name", of_one_process=True), headers=headers)
