"""RequireKey: no route without a key but those of probes. Stands before routing, so none can be
forgotten. `load_keys` says which keys there are."""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from formats.errors import InputError, one_line
from qserve.config import ServerConfig
from qserve.server.errors import ApiError
from qserve.setting import check_key

OPEN = {"/health", "/ready", "/ping"}  # say only whether the server works
PAGES = {"/", "/docs"}  # the same for everyone; a browser that opens one can send no key


class RequireKey:
    """ASGI middleware that answers 401 unless the header is exactly `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._expected = [_digest(b"Bearer " + key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_guarded(scope) and not self._has_key(scope):
            error = ApiError(
                401,
                "expected the header Authorization: Bearer KEY with a key of this server.",
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
        if len(given) != 1:
            return False
        digest = _digest(given[0])
        matches = [hmac.compare_digest(digest, expected) for expected in self._expected]
        return any(matches)


def load_keys(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """All keys: of the command line, the file and the environment. Raises InputError."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        path = Path(config.api_key_file)
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeError) as error:
            raise InputError(
                "--api-key-file", f"{path} cannot be read: {one_line(error)}"
            ) from error
        found = [line for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise InputError("--api-key-file", f"{path} holds no key", "write one into a line")
        for key in found:
            check_key(str(path), key)
        keys += found
    for key in filter(None, environment.get(config.api_key_env, "").split(",")):
        check_key(config.api_key_env, key)
        keys.append(key)
    return tuple(dict.fromkeys(keys))


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
