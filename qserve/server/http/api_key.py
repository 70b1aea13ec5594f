"""API keys. The check runs before routing, so a new route is protected by default."""

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from formats.errors import InputError, one_line
from qserve.command_line.setting import check_key
from qserve.config import ServerConfig
from qserve.server.http.errors import ApiError

OPEN = {"/health", "/ready", "/ping"}  # health probes
PAGES = {"/", "/docs"}  # static; a browser that opens one sends no key
BEARER = b"Bearer "
VLLM_VARIABLE = "VLLM_API_KEY"  # environment variable with the key of a vLLM server
KEY_DIGEST = "key_digest"  # key in the request's state

logger = logging.getLogger(__name__)


class Keys:
    """API keys of a server."""

    def __init__(self, config: ServerConfig) -> None:
        """Read the keys. Raises InputError if a file cannot be read.

        Logs a warning if the server has no keys, and vLLM's variable has one.
        """
        self._config = config
        self.reload()
        if not self and os.environ.get(VLLM_VARIABLE):
            logger.warning(
                "%s is set but not read, so requests need no API key; to require its keys, add"
                " --api-key-env %s",
                VLLM_VARIABLE,
                VLLM_VARIABLE,
            )

    def __bool__(self) -> bool:
        """Return True if requests need a key."""
        return bool(self.digests)

    def reload(self) -> None:
        """Read all keys again. If a file cannot be read, keep the old keys and raise InputError."""
        path = self._config.admin_api_key_file
        admins = () if path is None else _keys_of("--admin-api-key-file", path)
        keys = load_keys(self._config)
        self.digests = [_digest(BEARER + key.encode()) for key in (*keys, *admins)]
        self._admins = {_digest(BEARER + key.encode()).hex() for key in admins or keys}

    def is_admin(self, scope: Scope) -> bool:
        """Return True if the request's key may use the operator routes."""
        return scope.get("state", {}).get(KEY_DIGEST) in self._admins


class RequireKey:
    """ASGI middleware that answers 401 unless the request has a valid API key.

    The key is in the header `Authorization: Bearer KEY`, or in `x-api-key: KEY` as Anthropic's
    clients send it. Some of these clients send both, one with an outdated key, so one valid key is
    enough. The middleware stores the key's digest as `key_digest` in the request's state.
    """

    def __init__(self, app: ASGIApp, keys: "Keys") -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_guarded(scope):
            digest = self._valid_digest(scope)
            if digest is None:
                error = ApiError(
                    401,
                    "expected the header Authorization: Bearer KEY, or x-api-key: KEY, with a key"
                    " of this server.",
                    "Ask the operator for a key.",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response(scope, receive, send)
                return
            scope.setdefault("state", {})[KEY_DIGEST] = digest.hex()
        await self._app(scope, receive, send)

    def _is_guarded(self, scope: Scope) -> bool:
        # Browsers send CORS preflights (OPTIONS) without the key; no route answers OPTIONS.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["method"] != "OPTIONS" and path not in OPEN | PAGES

    def _valid_digest(self, scope: Scope) -> bytes | None:
        """Return the digest of the request's valid key; None if it has none."""
        found = None
        for header, prefix in ((b"authorization", b""), (b"x-api-key", BEARER)):
            given = [value for name, value in scope["headers"] if name == header]
            if len(given) != 1:
                continue
            digest = _digest(prefix + given[0])
            # Digests have equal length, so the comparison's time reveals nothing about the key.
            matches = [hmac.compare_digest(digest, expected) for expected in self._keys.digests]
            if any(matches):
                found = digest
        return found


def key_digest(scope: Scope) -> str:
    """Return a digest of a request's API key, for use in other processes instead of the key.

    If the server has no keys, any key that the client sends counts: a proxy may have checked it.
    """
    found = scope.get("state", {}).get(KEY_DIGEST)
    if found is not None:
        return found
    headers = dict(reversed(scope["headers"]))  # the first of several
    given = headers.get(b"authorization")
    if given is None:
        given = BEARER + headers[b"x-api-key"] if b"x-api-key" in headers else b""
    return _digest(given).hex()


def load_keys(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the keys from the command line, the file and the environment. Raises InputError."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += _keys_of("--api-key-file", config.api_key_file)
    for key in filter(None, environment.get(config.api_key_env, "").split(",")):
        check_key(config.api_key_env, key)
        keys.append(key)
    return tuple(dict.fromkeys(keys))


def _keys_of(flag: str, file: str) -> list[str]:
    """Return the keys in a file. Raises InputError."""
    path = Path(file)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(
            flag, f"{path} cannot be read: {one_line(error)}", "name a text file that you may read"
        ) from error
    found = [line for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise InputError(flag, f"{path} contains no key", "write one key per line")
    for key in found:
        check_key(str(path), key)
    return found


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
