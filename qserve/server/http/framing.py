"""Middlewares for the head of a request: root path, form of the target, size, framing, name.

All run before routing.
"""

import re
import uuid
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.server.http.errors import ApiError

MAX_HEAD_BYTES = 2**14  # the parser has no limit for a head that comes in one piece
LINE_BYTES = 4  # of a header's line, in addition to name and value
# Absolute form of a target: http://host:port/path
ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)


class UnderPath:
    """ASGI middleware for --root-path: sets `root_path`, and prefixes each path as ASGI demands.

    It accepts requests of proxies that keep the prefix and of proxies that strip it. The prefix
    without a trailing slash is redirected, since a browser resolves relative links from there.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
        if path == self._root and scope["method"] in ("GET", "HEAD"):
            location = (b"location", f"{self._root}/".encode())
            await send({"type": "http.response.start", "status": 307, "headers": [location]})
            await send({"type": "http.response.body"})
            return
        if path != self._root and not path.startswith(f"{self._root}/"):
            path, raw = self._root + path, self._root.encode() + raw
        scope = {**scope, "root_path": self._root, "path": path, "raw_path": raw}
        await self._app(scope, receive, send)


class OriginForm:
    """ASGI middleware that reads absolute-form targets, as RFC 9112 demands of every server.

    The target's authority takes the place of the Host header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
        if found is not None:
            authority, path = found[1], found[2] or b"/"
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {
                **scope,
                "path": unquote(path.decode("latin-1")),
                "raw_path": path,
                "headers": [(b"host", authority), *headers],
            }
        await self._app(scope, receive, send)


class CheckHead:
    """ASGI middleware that refuses heads that are too long or have two lengths (smuggling).

    With both Content-Length and Transfer-Encoding a proxy may use the other one of the two, and
    mistake the rest of the body for another client's request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _error(scope)
        if error is not None:
            await error.response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _error(scope: Scope) -> ApiError | None:
    headers = scope.get("headers", ())
    hang_up = {"Connection": "close"}
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        message = "expected Content-Length or Transfer-Encoding, found both."
        return ApiError(400, message, headers=hang_up)
    length = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    length += sum(len(name) + len(value) + LINE_BYTES for name, value in headers)
    if length > MAX_HEAD_BYTES:
        message = f"expected a head of at most {MAX_HEAD_BYTES} bytes."
        return ApiError(431, message, headers=hang_up)
    return None


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
