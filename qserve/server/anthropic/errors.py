"""Errors in the form of Anthropic's API: envelope, types, statuses and the request id.

One middleware converts all errors, also errors of other middleware and of the framework. So routes
raise the same ApiError for every API.
"""

import json
from http import HTTPStatus

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qserve.server.http.errors import INTERNAL, ApiError

PREFIX = "/v1/messages"
VERSION_HEADER = b"anthropic-version"
OVERLOADED, TIMEOUT = 529, 504
# status of an ApiError -> status that Anthropic's clients expect
STATUSES = {408: TIMEOUT, 503: OVERLOADED}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    TIMEOUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def envelope(status: int, message: str, request_id: str) -> dict:
    """Return Anthropic's error object for the status of an ApiError."""
    status = STATUSES.get(status, status)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def error_event(error: ApiError, request_id: str) -> dict:
    """Return the event that ends a stream after an error."""
    return envelope(error.status, error.short_message, request_id)


def is_anthropic(scope: Scope) -> bool:
    """Return True for paths of the Messages API, and for the header of Anthropic's clients."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return (
        path == PREFIX
        or path.startswith(f"{PREFIX}/")
        or any(name == VERSION_HEADER for name, _ in scope["headers"])
    )


class ConvertErrors:
    """ASGI middleware that converts error responses, and adds the header `request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_anthropic(scope):
            await self._app(scope, receive, send)
            return
        request_id = scope["state"]["request_id"]
        start: Message | None = None  # start of an error reply, kept until its body is complete
        has_started, body = False, b""

        async def converting(message: Message) -> None:
            nonlocal start, has_started, body
            if message["type"] == "http.response.start":
                has_started = True
                named = [*message.get("headers", ()), (b"request-id", request_id.encode())]
                message = {**message, "headers": named}
                if message["status"] >= 400:
                    start = message
                    return
            elif start is not None:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await _send_error(send, start, body, request_id, scope["method"])
                return
            await send(message)

        try:
            await self._app(scope, receive, converting)
        except Exception:
            if not has_started:
                headers = [(b"content-type", b"application/json")]
                await converting({"type": "http.response.start", "status": 500, "headers": headers})
                content = json.dumps({"error": {"message": INTERNAL}}).encode()
                await converting({"type": "http.response.body", "body": content})
            raise  # the web server logs it


async def _send_error(
    send: Send, start: Message, body: bytes, request_id: str, method: str
) -> None:
    status = start["status"]
    content = msgspec.json.encode(envelope(status, _message_of(status, body), request_id))
    headers = [
        (name, str(len(content)).encode() if name == b"content-length" else value)
        for name, value in start["headers"]
    ]
    await send({**start, "status": STATUSES.get(status, status), "headers": headers})
    is_head = method == "HEAD"
    await send({"type": "http.response.body", "body": b"" if is_head else content})


def _message_of(status: int, body: bytes) -> str:
    """Return the message in an error body of this server, or a default for the status."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return HTTPStatus(status).phrase if status in {*HTTPStatus} else "error"
