"""Small HTTP client for any OpenAI-compatible server. Loads no torch."""

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from formats.errors import InputError

TIMEOUT = 600.0  # seconds between two reads; long, because a request may wait in a queue


class ServerError(Exception):
    """The server answered with an error. The exception's text is the server's message."""


class ServerClient:
    """HTTP client for the server at `url`, such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                "--url",
                f"expected http://HOST:PORT/v1, found {url!r}",
                "give the address that the server printed, such as http://127.0.0.1:8000/v1",
            )
        # Also accept the URL that servers print, without /v1.
        self._parts, self._path = parts, parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> dict:
        """Return the JSON of the answer. Raises ServerError and OSError."""
        with self._reply("GET", path, None) as reply:
            return json.loads(reply.read())

    def get_outside(self, path: str) -> dict:
        """`get` for a route that is not under /v1, such as /load."""
        with self._reply("GET", path, None, self._path.removesuffix("/v1")) as reply:
            return json.loads(reply.read())

    def post(self, path: str, body: dict[str, Any]) -> dict:
        """Return the JSON of the answer. Raises ServerError and OSError."""
        with self._reply("POST", path, body) as reply:
            return json.loads(reply.read())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict]:
        """Yield the events of a streamed answer. Raises ServerError and OSError."""
        with self._reply("POST", path, body | {"stream": True}) as reply:
            for line in reply:
                data = line.strip().removeprefix(b"data:").strip()
                if data == line.strip() or not data:
                    continue  # the name of an event, a comment, or an empty line
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise ServerError(_message(event, "the stream ended with an error"))
                yield event

    @contextmanager
    def _reply(
        self, method: str, path: str, body: dict[str, Any] | None, base: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        host, port = self._parts.hostname, self._parts.port
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        try:
            content = None if body is None else json.dumps(body).encode()
            base = self._path if base is None else base
            connection.request(method, base + path, content, self._headers)
            reply = connection.getresponse()
            if reply.status >= 400:
                text = reply.read(100_000)
                try:
                    found = json.loads(text)
                except ValueError:
                    found = None
                raise ServerError(_message(found, f"status {reply.status}"))
            yield reply
        except ConnectionRefusedError as error:
            where = self._parts.netloc
            raise InputError(
                where,
                "no server answers at this address",
                "start one with `qserve serve`, or set --url",
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise InputError(
                self._parts.netloc,
                f"its certificate cannot be trusted: {error.verify_message}",
                "set the environment variable SSL_CERT_FILE to the file of its authority",
            ) from error
        except http.client.HTTPException as error:
            raise ServerError(f"the answer broke off: {type(error).__name__}") from error
        finally:
            connection.close()


def _message(found: Any, otherwise: str) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"]
    return error if isinstance(error, str) else otherwise
