"""UnderPath: the path under which a proxy offers this server. Stands before routing."""

from starlette.types import ASGIApp, Receive, Scope, Send


class UnderPath:
    """ASGI middleware that states the prefix as ASGI does: in `root_path`, and before each path.

    Some proxies send the prefix and others take it off: both are understood. The prefix alone is
    the page's address without its slash, from which a browser would look for all else beside it.
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
