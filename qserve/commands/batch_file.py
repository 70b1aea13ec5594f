"""Read a file in OpenAI's batch format as a list of requests and invalid lines.

An invalid line gets an error as its answer; the other lines still run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import InputError, one_line

URLS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
    *("/score", "/rerank", "/v2/rerank"),
)
PARTS = "custom_id, method, url and body"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A valid line: a request to run."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidLine:
    """An invalid line, with OpenAI's error code."""

    line: int  # starts at 1
    custom_id: str | None  # None: missing or unreadable
    code: str
    message: str

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object of the line's answer."""
        return {"code": self.code, "message": self.message, "line": self.line}


class _InvalidLineError(Exception):
    """Error in a line; its arguments are code and message."""


def read_batch(path: Path) -> tuple[bytes, list[BatchRequest | InvalidLine]]:
    """Return a file's bytes and its non-empty lines. Raises InputError if it is unreadable."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            str(path), f"cannot be read: {one_line(error)}", "check the path given with -i"
        ) from error
    return content, list(_lines(content))


def _lines(content: bytes) -> Iterator[BatchRequest | InvalidLine]:
    seen: dict[str, int] = {}  # custom_id -> its line
    # Only a newline ends a line: JSON strings may contain Unicode's other separators.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        fields, name = None, None
        try:
            fields = _object(line)
            name = fields.get("custom_id")
            name = name if isinstance(name, str) else None
            request = _request(fields, name)
            if request.custom_id in seen:
                raise _InvalidLineError(
                    "duplicate_custom_id",
                    f"expected a unique custom_id, found the one of line {seen[name]}",
                )
            yield request
        except _InvalidLineError as wrong:
            code, message = wrong.args
            yield InvalidLine(line=number, custom_id=name, code=code, message=message)
        if name is not None:
            seen.setdefault(name, number)


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise _InvalidLineError(
            "invalid_json_line", f"expected a JSON object: {one_line(error)}"
        ) from error
    if not isinstance(found, dict):
        raise _InvalidLineError("invalid_json_line", f"expected a JSON object with {PARTS}")
    return found


def _request(fields: dict[str, Any], name: str | None) -> BatchRequest:
    missing = [key for key in ("custom_id", "url", "body") if key not in fields]
    if missing:
        raise _InvalidLineError(
            "missing_required_parameter", f"expected {PARTS}, found no {missing[0]}"
        )
    url, body, method = fields["url"], fields["body"], fields.get("method", "POST")
    if name is None:
        raise _InvalidLineError("invalid_custom_id", "expected a custom_id that is a string")
    if method != "POST":
        raise _InvalidLineError(
            "invalid_method", f"expected the method POST, found {_short(method)}"
        )
    if url not in URLS:
        raise _InvalidLineError(
            "invalid_url", f"expected one of {', '.join(URLS)}, found {_short(url)}"
        )
    if not isinstance(body, dict):
        raise _InvalidLineError("invalid_body", "expected a body that is an object")
    if body.get("stream"):
        raise _InvalidLineError(
            "invalid_body", "expected a body without stream: each answer is one line"
        )
    return BatchRequest(custom_id=name, url=url, body=body)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
