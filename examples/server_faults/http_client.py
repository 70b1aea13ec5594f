"""A small HTTP client on asyncio: whole replies, streams with the time of each event, raw bytes."""

import asyncio
import json
import time
from dataclasses import dataclass, field

API_KEY = "faults"  # for servers that need a key; others do not read it
KEY = f"Authorization: Bearer {API_KEY}\r\n"
TIMEOUT = 300.0  # seconds, against hanging: whatever takes longer counts as a hang


@dataclass(slots=True, kw_only=True)
class Reply:
    """Reply to a request. Status 0: the connection ended without an answer; -1: timeout."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    times: list[float] = field(default_factory=list)  # arrival time of each event of a stream

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def error(self) -> dict | None:
        """The error of a plain reply, or the one that a stream ended with."""
        for line in reversed(self.body.splitlines()):
            if line.startswith((b"{", b"data: {")):
                return json.loads(line.removeprefix(b"data: ")).get("error")
        return None


def request_bytes(path: str, body: bytes | dict | None) -> bytes:
    """A whole HTTP request; without a body a GET."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\n{KEY}Connection: close\r\n\r\n".encode()
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{KEY}Connection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, path: str, body: bytes | dict | None = None) -> Reply:
    """Send one request and read all of its answer."""
    return await exchange(port, request_bytes(path, body))


async def exchange(port: int, data: bytes, timeout: float = TIMEOUT) -> Reply:
    """Send bytes and read until the server closes."""
    try:
        async with asyncio.timeout(timeout):
            return await _exchange(port, data)
    except TimeoutError:
        return Reply(status=-1)
    except (ConnectionError, asyncio.IncompleteReadError):
        return Reply(status=0)


async def _exchange(port: int, data: bytes) -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sending = asyncio.create_task(_send(writer, data))
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        reply = Reply(status=int(first.split()[1]))
        for line in lines:
            name, _, value = line.partition(": ")
            reply.headers[name.lower()] = value
        parts = []
        # If the connection stays open, the length says where the answer ends.
        length = int(reply.headers.get("content-length", 2**62))
        num_read = 0
        while num_read < length and (part := await reader.read(2**16)):
            num_read += len(part)
            reply.times += [time.perf_counter()] * part.count(b"\ndata: {")
            if part.startswith(b"data: {"):
                reply.times.append(time.perf_counter())
            parts.append(part)
        # Broken bytes after a complete request are answered, too.
        reply.body = _unchunked(b"".join(parts), reply.headers)[:length]
        return reply
    finally:
        sending.cancel()
        writer.close()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    # The server may answer and close before it has read all.
    try:
        for start in range(0, len(data), 2**16):
            writer.write(data[start : start + 2**16])
            await writer.drain()
    except ConnectionError:
        return


def _unchunked(data: bytes, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return data
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:  # what follows is another answer
            break
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)
