"""RequireKey: no route without the key but one. Stands before routing, so none can be forgotten."""

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.server.errors import ApiError

OPEN = {"/health", "/ready", "/ping"}  # say only whether the server works
PAGES = {"/", "/docs"}  # the same for everyone; a browser that opens one can send no key


class RequireKey:
    """ASGI middleware that answers 401 unless the header is exactly `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = _digest(b"Bearer " + key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_guarded(scope) and not self._has_key(scope):
            error = ApiError(
                401,
                "expected the header Authorization: Bearer KEY with this server's key.",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_guarded(self, scope: Scope) -> bool:
        # A browser asks with OPTIONS, without the key, what it may send; nothing else answers it.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["method"] != "OPTIONS" and path not in OPEN | PAGES

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # Digests have one length, so the comparison's time says nothing about the key.
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._expected)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
