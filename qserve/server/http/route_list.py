"""Lists of routes, filled by decorators."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from qserve.server.http.errors import ApiError

READ = ("GET", "HEAD")

Handler = Callable[[Request], Awaitable[Response]]


class CountedRoute(Route):
    """A route that adds itself to the request's scope, for metrics by route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, found | {"route": self} if match is not Match.NONE else found


class RouteList(list[CountedRoute]):
    """Routes of one topic; the first that matches answers."""

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


def refusing(routes: Sequence[Route], reason: str) -> list[CountedRoute]:
    """Routes with the same paths and methods that answer 404 with a reason."""

    async def refuse(_: Request) -> Response:
        raise ApiError(404, reason)

    return [CountedRoute(each.path, refuse, methods=sorted(each.methods)) for each in routes]
