"""RouteList: the routes of one topic, filled by decorators."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

READ = ("GET", "HEAD")

Handler = Callable[[Request], Awaitable[Response]]


class CountedRoute(Route):
    """A route that a request's scope names, so that answers are counted by it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, found | {"route": self} if match is not Match.NONE else found


class RouteList(list[CountedRoute]):
    """Looked through in order."""

    def route(self, path: str, methods: Sequence[str]) -> Callable[[Handler], Handler]:
        """Have a function answer requests of a path."""

        def add(handler: Handler) -> Handler:
            self.append(CountedRoute(path, handler, methods=methods))
            return handler

        return add

    def read(self, path: str) -> Callable[[Handler], Handler]:
        return self.route(path, READ)

    def post(self, path: str) -> Callable[[Handler], Handler]:
        return self.route(path, ("POST",))
