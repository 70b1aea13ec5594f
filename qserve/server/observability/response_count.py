"""Middleware that counts every response for the metrics. It runs before all others."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.server.http.errors import CLIENT_GONE
from qserve.server.observability.metrics import Metrics

METRICS = "metrics"  # in a request's scope: those of its model, if the server has several
UNROUTED = "none"  # no route matched, or the request was refused before routing


class CountResponses:
    """ASGI middleware that counts each request once, by route and response status.

    `metrics` are those of the first model; requests to another count there.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
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
                self._count(
                    scope, 500
                )  # the framework sends this answer outside of this middleware
            raise
        if status is None:
            self._count(scope, CLIENT_GONE)

    def _count(self, scope: Scope, status: int) -> None:
        # The router sets it. Its path has parameter names instead of the client's values.
        path = getattr(scope.get("route"), "path", None)
        metrics = scope.get(METRICS, self._metrics)
        metrics.count_response(scope["method"], path or UNROUTED, status)
