"""Lists of routes, filled by decorators; middleware that counts responses by route."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.server.http.errors import CLIENT_GONE, ApiError

READ = ("GET", "HEAD")
METRICS = "metrics"  # key in a request's scope: metrics of its model, if there are several
UNROUTED = "none"  # no route matched, or the request was refused before routing

Handler = Callable[[Request], Awaitable[Response]]


class CountedRoute(Route):
    """A route that adds itself to the request's scope, for metrics by route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, found | {"route": self} if match is not Match.NONE else found


class RouteList(list[CountedRoute]):
    """Routes of one topic. The first route that matches a request handles it."""

    def route(self, path: str, methods: Sequence[str]) -> Callable[[Handler], Handler]:
        """Register the decorated function for a path."""

        def add(handler: Handler) -> Handler:
            self.append(CountedRoute(path, handler, methods=methods))
            return handler

        return add

    def read(self, path: str) -> Callable[[Handler], Handler]:
        return self.route(path, READ)

    def post(self, path: str) -> Callable[[Handler], Handler]:
        return self.route(path, ("POST",))


class ResponseMetrics(Protocol):
    """The method of Metrics that CountResponses uses."""

    def count_response(self, method: str, handler: str, status: int) -> None: ...


class CountResponses:
    """ASGI middleware that counts each request once, by route and response status.

    `metrics` belong to the first model. Requests to another model count in that model's metrics.
    """

    def __init__(self, app: ASGIApp, metrics: ResponseMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = None

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._count(scope, status)
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:
            if status is None:
                # the framework sends the error reply outside of this middleware
                self._count(scope, 500)
            raise
        if status is None:
            self._count(scope, CLIENT_GONE)

    def _count(self, scope: Scope, status: int) -> None:
        # The router sets "route". The route's path has parameter names instead of values.
        path = getattr(scope.get("route"), "path", None)
        metrics = scope.get(METRICS, self._metrics)
        metrics.count_response(scope["method"], path or UNROUTED, status)


def refusing(routes: Sequence[Route], reason: str, remedy: str) -> list[CountedRoute]:
    """Return routes with the same paths and methods that answer 404 with these sentences."""

    async def refuse(_: Request) -> Response:
        raise ApiError(404, reason, remedy)

    return [CountedRoute(each.path, refuse, methods=sorted(each.methods)) for each in routes]
