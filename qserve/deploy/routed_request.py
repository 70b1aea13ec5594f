"""RoutedRequest: an HTTP request sent from the gateway to a replica, with the text to route by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

# Fields that come before the prompt in the model's input or separate KV pages, and prompt fields
LEADING = ("model", "cache_salt", "tools")
PROMPTS = ("messages", "prompt", "input", "query")
MAX_TEXT = 2**18  # maximum bytes of a prompt that routers compare


class _Body(msgspec.Struct):
    """Fields of a body by which it is routed. Raw values are not decoded."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """All parts of a request that a replica's app needs."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes
    text: bytes = b""  # text by which routers compare prompts

    def scope(self) -> dict[str, Any]:
        """Return the ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": None,
            "state": {},
        }

    @classmethod
    def of_scope(cls, scope: Mapping[str, Any], body: bytes, text: bytes) -> "RoutedRequest":
        root = scope.get("root_path", "")
        return cls(
            method=scope["method"],
            path=scope["path"].removeprefix(root) or "/",
            query=scope.get("query_string", b""),
            # The body is complete here, even if it arrived in chunks.
            headers=[
                *((k, v) for k, v in scope["headers"] if k not in FRAMING),
                *([(b"content-length", str(len(body)).encode())] if body else []),
            ],
            client=tuple(scope["client"]) if scope.get("client") else None,
            body=body,
            text=text,
        )


FRAMING = (b"content-length", b"transfer-encoding")


def look_into(body: bytes) -> tuple[str | None, bytes]:
    """Return the model that a body names, and the text by which routers compare prompts.

    For an invalid body returns (None, b""); the replica then reports the error.
    """
    try:
        found = _DECODER.decode(body)
        model = msgspec.json.decode(found.model) if found.model else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, b""
    parts = [bytes(getattr(found, name)) for name in (*LEADING, *PROMPTS)]
    # Strip the end of the list of messages, because the next turn's text differs there.
    text = b"\n".join(part for part in parts if part).rstrip(b"]} \n")
    return (model if isinstance(model, str) else None), text[:MAX_TEXT]
