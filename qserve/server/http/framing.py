"""Middleware for the head of a request: root path, target, size, framing, request id.

All of it runs before routing.
"""

import re
import uuid
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.server.http.errors import ApiError

MAX_HEAD_BYTES = 2**14  # the parser does not limit a head that arrives in one piece
LINE_BYTES = 4  # bytes of a header line besides name and value: colon, space, CR, LF
# Absolute form of a request target: http://host:port/path
ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)


class UnderPath:
    """ASGI middleware for --root-path: sets `root_path`, and adds the prefix to paths without it.

    So proxies may keep the prefix or strip it. The prefix without a trailing slash is redirected to
    the one with it, since browsers resolve relative links from there.
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
    """ASGI middleware that accepts absolute-form request targets, which RFC 9112 requires.

    The target's authority replaces the Host header.
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
    """ASGI middleware that refuses heads that are too long or allow request smuggling.

    A request may have both Content-Length and Transfer-Encoding. A proxy may then use the header
    that this server ignores, and treat the rest of the body as another client's request.
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
        return ApiError(400, message, "Send only one of these headers.", headers=hang_up)
    length = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    length += sum(len(name) + len(value) + LINE_BYTES for name, value in headers)
    if length > MAX_HEAD_BYTES:
        message = f"expected a head of at most {MAX_HEAD_BYTES} bytes."
        return ApiError(431, message, "Shorten the URL or the headers.", headers=hang_up)
    return None


HEADER = b"x-request-id"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class NameRequests:
    """ASGI middleware that sets the reply's X-Request-Id: the request's, or a new one.

    An id that does not match REQUEST_ID (too long, or other characters) is replaced by a new one.
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
