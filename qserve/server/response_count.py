"""CountResponses: the status of every answer, for the metrics. Stands before all else."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.server.errors import CLIENT_GONE
from qserve.server.metrics import Metrics

UNROUTED = "none"  # what no route has, or what was refused before one was looked for


class CountResponses:
    """ASGI middleware that counts each request once, by its route and the status of its answer."""

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
                self._count(scope, 500)  # which the framework answers outside of this
            raise
        if status is None:
            self._count(scope, CLIENT_GONE)

    def _count(self, scope: Scope, status: int) -> None:
        # The router sets it. Its path has names in place of what the client sent.
        path = getattr(scope.get("route"), "path", None)
        self._metrics.count_response(path or UNROUTED, status)
