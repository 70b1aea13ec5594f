"""Request ids: the client's or a generated one, repeated in the response."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class NameRequests:
    """ASGI middleware: the header X-Request-Id of a request, or a new name, is its answer's.

    A name that is too long or holds other signs than REQUEST_ID goes nowhere: a new one takes its
    place, as proxies do it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"], state["is_named"] = _name(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (HEADER, state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, named)


def _name(scope: Scope) -> tuple[str, bool]:
    given = [value for name, value in scope["headers"] if name == HEADER]
    text = given[0].decode("latin-1") if len(given) == 1 else ""
    if REQUEST_ID.fullmatch(text):
        return text, True
    return uuid.uuid4().hex, False
