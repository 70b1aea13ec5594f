"""A small HTTP client for any OpenAI-compatible server. Knows no prompts; loads no torch."""

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from formats.errors import InputError

TIMEOUT = 600.0  # seconds between two reads; a long queue takes its time


class ServerError(Exception):
    """The server's answer is an error; the text is its message."""


class ServerClient:
    """Sends requests to the server at `url`, such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("--url", f"expected http://HOST:PORT/v1, found {url!r}")
        # As servers print it: without the path of the API.
        self._parts, self._path = parts, parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> dict:
        """The answer's JSON. Raises ServerError and OSError."""
        with self._reply("GET", path, None) as reply:
            return json.loads(reply.read())

    def post(self, path: str, body: dict[str, Any]) -> dict:
        """The answer's JSON. Raises ServerError and OSError."""
        with self._reply("POST", path, body) as reply:
            return json.loads(reply.read())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict]:
        """The events of a streamed answer. Raises ServerError and OSError."""
        with self._reply("POST", path, body | {"stream": True}) as reply:
            for line in reply:
                data = line.strip().removeprefix(b"data:").strip()
                if data == line.strip() or not data:
                    continue  # the name of an event, a comment, or the line between two
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise ServerError(_message(event, "the stream ended with an error"))
                yield event

    @contextmanager
    def _reply(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        host, port = self._parts.hostname, self._parts.port
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, self._headers)
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
                where, "no server answers there", "start one with `qserve serve`, or give --url"
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise InputError(
                self._parts.netloc,
                f"its certificate cannot be trusted: {error.verify_message}",
                "name the file of its authority in the environment's SSL_CERT_FILE",
            ) from error
        except http.client.HTTPException as error:
            raise ServerError(f"the answer was cut: {type(error).__name__}") from error
        finally:
            connection.close()


def _message(found: Any, otherwise: str) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"]
    return error if isinstance(error, str) else otherwise
