"""SelectModel: middleware that finds a request's model, on a server of several models."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.server.http.body import Body
from qserve.server.http.clients import client_key
from qserve.server.http.errors import ApiError, ClientGone
from qserve.server.http.route_list import METRICS
from qserve.server.models.turns import ModelTurns
from qserve.server.service import SERVICE, Service

JSON = "application/json"
# Routes that need no engine, so they work while the model sleeps
WITHOUT_ENGINE = {
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    "/reset_prefix_cache",
}
WITHOUT_MODEL = ("/v1/conversations",)  # prefixes of routes that do not depend on a model


class _Named(msgspec.Struct):
    """The field `model` of a body, not decoded."""

    model: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Named)


def named_service(services: Sequence[Service], name: str) -> Service:
    """Return the Service of a model or adapter by name. Raises ApiError(404)."""
    for service in services:
        if name in service.model_names or name in service.adapters.of_name:
            return service
    known = [known for each in services for known in (*each.model_names, *each.adapters.of_name)]
    raise ApiError(
        404,
        f"The model {name[:200]!r} does not exist; this server serves"
        f" {', '.join(map(repr, known))}.",
        "Use one of these names.",
        "model",
    )


class SelectModel:
    """ASGI middleware that puts the Service of the request's model into the scope.

    The model is named by the query parameter `model`, or by the field `model` of a JSON body. The
    middleware reads the body, and replays it for the route.
    """

    def __init__(
        self,
        app: ASGIApp,
        services: Sequence[Service],
        operator_paths: frozenset[str],
        turns: ModelTurns | None = None,
    ) -> None:
        """`operator_paths`: operator routes, which need the query parameter `model`."""
        self._app, self._services, self._turns = app, tuple(services), turns
        self._operator_paths = operator_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            service, body = await self._find(scope, path, receive)
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        except ClientGone:
            return
        if body is not None:
            # The body has been received, so the next message is the client's disconnect.
            leaving = asyncio.ensure_future(receive())
            receive = _replay(body, leaving)
        else:
            leaving = None
        scope[SERVICE], scope[METRICS] = service, service.metrics
        is_engines = scope["method"] == "POST" and path not in WITHOUT_ENGINE
        try:
            async with self._turn(service if is_engines else None, leaving):
                await self._app(scope, receive, send)
        except _TurnError as error:
            await error.problem.response(scope, receive, send)
        except ClientGone:
            return
        finally:
            if leaving is not None:
                leaving.cancel()

    async def _find(
        self, scope: Scope, path: str, receive: Receive
    ) -> tuple[Service, bytes | None]:
        """Return the Service of a request, and the body if it was read. Raises ApiError."""
        named = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("model")
        if named:
            return named_service(self._services, named[0]), None
        if path in self._operator_paths:
            names = " or ".join(f"?model={each.model_name}" for each in self._services)
            raise ApiError(
                400, "This server has several models.", f"Add {names} to the URL.", "model"
            )
        first = self._services[0]
        request = Request(scope, receive)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] != "POST" or kind != JSON or path.startswith(WITHOUT_MODEL):
            return first, None
        with Body(request, client_key(scope), first) as body:
            data = bytes(await body.read())
        try:
            found = _DECODER.decode(data).model
            name = msgspec.json.decode(found) if found else None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return first, data  # the route reports the error
        if name is None:
            names = ", ".join(repr(each.model_name) for each in self._services)
            raise ApiError(
                400, f"model: expected one of {names}, found none.", "Add the field.", "model"
            )
        return (named_service(self._services, name) if isinstance(name, str) else first), data

    @contextlib.asynccontextmanager
    async def _turn(
        self, service: Service | None, leaving: asyncio.Future[Message] | None
    ) -> AsyncIterator[None]:
        """Keep the model awake inside the `with` block. Raises _TurnError and ClientGone."""
        if self._turns is None or service is None:
            yield
            return
        entering = asyncio.ensure_future(self._turns.enter(self._services.index(service)))
        try:
            watched = [entering] if leaving is None else [entering, leaving]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                raise ClientGone
            try:
                entering.result()
            except ApiError as error:
                raise _TurnError(error) from None
            yield
        finally:
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                self._turns.leave()
            else:
                entering.cancel()


class _TurnError(Exception):
    """The model did not wake up."""

    def __init__(self, problem: ApiError) -> None:
        super().__init__(problem.message)
        self.problem = problem


def _replay(body: bytes, leaving: asyncio.Future[Message]) -> Receive:
    """Return a `receive` that returns the body, then the client's disconnect."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.shield(leaving)

    return receive
