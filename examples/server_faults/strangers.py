"""Hostile clients and model folders: resets, web pages, endless templates."""

import argparse
import asyncio
import json
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bodies import CHAT, COMPLETIONS
from http_client import Reply, ask, exchange, request_bytes
from probe import Probe
from server import Server

Line = Callable[..., None]  # Report.line
BURST, BURST_SECONDS = 1000, 1.0  # connections, and how long a new one may wait after them
LEAVE_SECONDS = 10.0  # until nothing is held of a client that left
ENDLESS_TEMPLATE = """
{%- for message in messages %}{{ message.content }}{% if message.content == "loop" %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- endfor %}"""


async def strangers(line: Line, model: str, options: argparse.Namespace) -> None:
    """Connections and web pages."""
    async with await Server.start(model, {"max_num_batched_tokens": 512}, {}) as server:
        body = {"prompt": "Once", "max_tokens": 200, "stream": True}
        await asyncio.to_thread(_burst, server.port, request_bytes(COMPLETIONS, body))
        started = time.perf_counter()
        reply = await ask(server.port, "/health")
        waited = time.perf_counter() - started
        line(
            f"{BURST} x connect, send, reset",
            f"a new connection waits {waited * 1e3:.0f} ms: {reply.status}",
            reply.status == 200 and waited < BURST_SECONDS,
        )
        statuses = [
            (await _half_closed(server.port, request_bytes(path, each))).count(b" 200 OK")
            for path, each in (("/health", None), (COMPLETIONS, body))
        ]
        line("half-closed clients", f"{statuses} answers", statuses == [1, 1])
        target = request_bytes(f"http://127.0.0.1:{server.port}/v1/models", None)
        reply = await exchange(server.port, target)
        line("absolute-form target", str(reply.status), reply.status == 200)
        await _pages(line, server.port)
        await _leaving(line, server)


async def _pages(line: Line, port: int) -> None:
    plain = request_bytes(COMPLETIONS, {"prompt": "Once", "max_tokens": 1})
    kinds = {
        "page of another site": plain.replace(b"Host: x", b"Host: x\r\nOrigin: https://a.example"),
        "name of another site": plain.replace(b"Host: x", b"Host: a.example"),
        "body without a type": plain.replace(b"Content-Type: application/json\r\n", b""),
        "own page": plain.replace(b"Host: x", b"Host: x\r\nOrigin: http://x"),
    }
    expected = [403, 403, 415, 200]
    for (name, data), status in zip(kinds.items(), expected, strict=True):
        reply = await exchange(port, data)
        line(name, f"{reply.status}, expected {status}", reply.status == status)


async def _leaving(line: Line, server: Server) -> None:
    """A client asks for much work and leaves: measure another stream, and what is still held."""
    body = {"prompt": [5] * 1500, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 1}
    async with Probe.start(server.port) as probe:
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request_bytes(COMPLETIONS, body))
            await asyncio.sleep(2)
            writer.transport.abort()
        started = time.perf_counter()
        reply = await ask(server.port, COMPLETIONS, {"prompt": "Once", "max_tokens": 3})
        waited = time.perf_counter() - started
    held = await server.held()
    line(
        "n 128 with echo and logprobs 20, gone",
        f"a small request after it: {reply.status} in {waited:.1f} s; the stream's worst gap"
        f" {max(probe.gaps) * 1e3:.0f} ms; held: {held or 'nothing'}",
        reply.status == 200 and waited < LEAVE_SECONDS and not held,
    )


async def templates(line: Line, model: str, options: argparse.Namespace) -> None:
    """A chat template that never ends for one message."""
    with tempfile.TemporaryDirectory() as folder:
        hostile = Path(folder) / "model"
        shutil.copytree(model, hostile)
        (hostile / "chat_template.jinja").write_text(ENDLESS_TEMPLATE)
        async with await Server.start(str(hostile), {}, {}) as server:
            async with Probe.start(server.port) as probe:
                endless = asyncio.create_task(ask(server.port, CHAT, _chat("loop")))
                await asyncio.sleep(1)
                replies: list[Reply] = [
                    await ask(server.port, COMPLETIONS, {"prompt": "Once", "max_tokens": 3}),
                    await endless,
                    await ask(server.port, CHAT, _chat("hello")),
                ]
            statuses = [reply.status for reply in replies]
            line(
                "template without end",
                f"other completion, this chat, next chat: {statuses}; the stream's worst gap"
                f" {max(probe.gaps) * 1e3:.0f} ms",
                statuses == [200, 400, 200],
            )
            endless = asyncio.create_task(ask(server.port, CHAT, _chat("loop")))
            await asyncio.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            code = await server.exit_code()
            line("SIGTERM meanwhile", f"exit code {code}", code == 0)
            await endless


def _chat(text: str) -> bytes:
    message = {"role": "user", "content": text}
    return json.dumps({"messages": [message], "max_tokens": 3}).encode()


def _burst(port: int, data: bytes) -> None:
    for _ in range(BURST):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(data)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


async def _half_closed(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
