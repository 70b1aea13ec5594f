"""RefuseTwoLengths: a request that states its length in two ways. Stands before routing."""

from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.server.errors import ApiError


class RefuseTwoLengths:
    """ASGI middleware that answers 400 to Content-Length beside Transfer-Encoding, and hangs up.

    A proxy may believe the other one of the two, and take the rest of the body for the request of
    somebody else.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            error = ApiError(
                400,
                "expected Content-Length or Transfer-Encoding, found both.",
                headers={"Connection": "close"},
            )
            await error.response(scope, receive, send)
            return
        await self._app(scope, receive, send)
