"""CheckHead: what the head of a request must not be. Stands before routing."""

from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.server.errors import ApiError

MAX_HEAD_BYTES = 2**14  # the parser has no limit for a head that comes in one piece
LINE_BYTES = 4  # of a header's line, beside its name and value


class CheckHead:
    """ASGI middleware that hangs up on a head that is too long, or that states two lengths.

    With Content-Length beside Transfer-Encoding a proxy may believe the other one of the two, and
    take the rest of the body for the request of somebody else.
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
