"""Connections at their limits, and bytes that are no HTTP: an answer where there can be one."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from qserve.server.http import http_protocol
from qserve.server.http.http_protocol import max_connections

GUARD = 60.0  # seconds, against hanging
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=GUARD)
    connection.sendall(data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def envelope(answer: bytes, status: int) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-type: application/json" in head.lower()
    assert f"content-length: {len(body)}".encode() in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == status and len(answer) < 4096
    return error


def status_of(port: int) -> bytes:
    with connect(port, GET.replace(b"x\r\n", b"x\r\nConnection: close\r\n")) as connection:
        return read_all(connection)[9:12]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET /health HTTP/x\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000, 431),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_invalid_request_bytes_get_error_body(server, live, data, status):
    with connect(live, data) as connection:
        envelope(read_all(connection), status)
    assert status_of(live) == b"200"


@pytest.mark.parametrize("first", [b"Content-Length: 15\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_conflicting_lengths_are_refused_and_connection_closed(server, live, first):
    second = b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n".replace(first, b"")
    data = POST + first + second + b'\r\nf\r\n{"prompt": "a"}\r\n0\r\n\r\n'
    with connect(live, data + GET) as connection:
        assert "found both" in envelope(read_all(connection), 400)["message"]
    assert not server.client.requests


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_upgrade_headers_are_ignored(live, caplog, protocol):
    offer = b"Connection: Upgrade, close\r\nUpgrade: " + protocol + b"\r\n\r\n"
    with connect(live, GET.removesuffix(b"\r\n") + offer) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_chunks_of_a_few_bytes_are_refused(server, live):
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "' + b"a" * 100_000 + b'"}')
    with connect(live, POST + b"Transfer-Encoding: chunked\r\n\r\n" + body) as connection:
        assert "larger chunks" in envelope(read_all(connection), 400)["message"]


def test_error_is_not_written_into_started_response(server, run_live):
    """Bytes after a request that look like a chunked body end only that request's stream."""
    ended = threading.Event()

    async def pieces():
        yield b"first"
        while not ended.is_set():
            await asyncio.sleep(0.01)

    async def stream(_request):
        return StreamingResponse(pieces())

    server.app.router.routes.insert(0, Route("/stream", stream))
    with connect(run_live(server), GET.replace(b"/health", b"/stream")) as connection:
        answer = b""
        while b"first" not in answer:
            answer += connection.recv(65536)
        connection.sendall(b"\r\n1\r\nx" * 200)
        answer += read_all(connection)
        ended.set()
    assert answer.count(b"HTTP/1.1") == 1


def test_chunks_are_sent_without_waiting_for_ack(server, run_live, monkeypatch):
    """Else the first tokens of a stream come 40 ms late, from a connection's second request on."""
    options = []

    def look(connection: socket.socket) -> None:
        options.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(http_protocol, "_give_up_on_vanished_peers", look)
    assert status_of(run_live(server)) == b"200"
    assert options and all(options)


def test_chunks_of_a_sensible_size_are_a_body(server, live):
    body = b'{"prompt": "Once", "user": "' + b"u" * 50_000 + b'"}'
    pieces = [body[start : start + 1000] for start in range(0, len(body), 1000)]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    head = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with connect(live, head + chunked) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_refusal_in_the_middle_of_a_long_body_reaches_the_client(server, live):
    body = b'{"prompt": [' + b"[]," * 2_500_000 + b"1]}"
    head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(live, head + body) as connection:
        assert "lists and objects" in envelope(read_all(connection), 400)["message"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", POST + b"Content-Length: 9\r\n"])
def test_silent_connection_is_closed(server, live, monkeypatch, sent):
    monkeypatch.setattr(http_protocol, "IDLE_SECONDS", 0.2)
    with connect(live, sent) as connection:
        answer = read_all(connection)
    if sent:
        envelope(answer, 408)
    else:
        assert answer == b""


def test_slow_header_connection_is_closed(server, live, monkeypatch):
    monkeypatch.setattr(http_protocol, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.1)
    with connect(live) as connection, pytest.raises(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(int(GUARD / 0.05)):
            connection.sendall(b"A")
            time.sleep(0.05)


def test_missing_body_times_out(server, live, monkeypatch):
    monkeypatch.setattr("qserve.server.http.body.BODY_SECONDS", 0.2)
    with connect(live, POST + b"Connection: close\r\nContent-Length: 99\r\n\r\n{") as connection:
        envelope(read_all(connection), 408)
    assert server.app.state.service.bodies.held == 0


def test_connection_limit_closes_longest_idle(server, run_live):
    port = run_live(server, limit=4)
    idle = [connect(port, b"GET /") for _ in range(4)]
    half = connect(port, POST + b"Content-Length: 99\r\n\r\n{")  # the first idle one goes
    for _ in range(5):
        assert status_of(port) == b"200"
    with contextlib.suppress(ConnectionResetError):
        assert idle[0].recv(10) == b""
    for connection in [*idle, half]:
        connection.close()
    assert status_of(port) == b"200"


def test_connection_limit_with_busy_connections_returns_503(server, run_live):
    port = run_live(server, limit=3)
    server.client.endless, server.client.delay = True, 0.01
    body = b'{"prompt": "a", "stream": true, "max_tokens": 250, "ignore_eos": true}'
    stream = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    working = [connect(port, stream) for _ in range(3)]
    for connection in working:
        assert connection.recv(12) == b"HTTP/1.1 200"
    with connect(port, GET) as connection:
        answer = read_all(connection)
    assert "connection limit" in envelope(answer, 503)["message"] and b"\r\nretry-after: " in answer
    many = [connect(port) for _ in range(2 * http_protocol.NUM_REFUSED)]
    assert working[0].recv(12)
    for connection in [*many, *working]:
        connection.close()
    deadline = time.monotonic() + GUARD
    while status_of(port) != b"200":
        assert time.monotonic() < deadline
    assert server.connections.num_refused == 0


def test_several_requests_on_one_connection_are_answered_in_order(server, live):
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with connect(live, GET + GET + last) as connection:
        assert read_all(connection).count(b"HTTP/1.1 200") == 3


def completion(**fields) -> bytes:
    body = json.dumps({"prompt": "Once", "max_tokens": 3, **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_reset_connections_start_no_request(server, run_live):
    """A client that sends and resets leaves bytes that can be read, but waits for no answer."""
    gate, entered = threading.Event(), threading.Event()

    async def hold(_request):
        entered.set()
        gate.wait(GUARD)  # blocks the event loop until the burst is over
        return Response()

    server.app.router.routes.insert(0, Route("/hold", hold))
    port = run_live(server)
    early = connect(port, POST)  # accepted before the burst
    with connect(port, GET.replace(b"/health", b"/hold")):
        assert entered.wait(GUARD)
        early.sendall(completion()[len(POST) :])
        for each in (early, *(connect(port, completion()) for _ in range(10))):
            linger = struct.pack("ii", 1, 0)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            each.close()
        gate.set()
        assert status_of(port) == b"200"
    assert not server.client.requests


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_half_closed_client_gets_its_answer(server, live, version, fields):
    server.client.delay = 0.02
    with connect(live, completion(**fields).replace(b"1.1", version)) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    *interim, final = answer.split(b"HTTP/1.1 ")[1:]
    assert all(each == b"100 Continue\r\n\r\n" for each in interim)
    assert not (interim and version == b"1.0")
    assert final.startswith(b"200 ") and b'"finish_reason":"length"' in final
    assert not server.client.aborted


def test_all_requests_of_a_half_closed_client_are_answered(server, live):
    with connect(live, GET + GET + completion()) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_close_after_request_is_detected(server, live, version, monkeypatch):
    """Its end looks like a half-closed one. Its request would take 20 s."""
    monkeypatch.setattr(http_protocol, "HALF_CLOSED_SECONDS", 0.1)
    server.client.endless, server.client.delay = True, 0.1
    with connect(live, completion(max_tokens=200).replace(b"1.1", version)):
        deadline = time.monotonic() + GUARD
        while not server.client.running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    while server.client.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.client.aborted


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://127.0.0.1:80/health", 200),
        (b"HTTP://x/v1/models?limit=1", 200),
        (b"http://x", 200),  # the page at /
        (b"http://x/no%2Fthing", 404),
        (b"http://evil.example/v1/models", 403),  # instead of the Host header
    ],
)
def test_absolute_targets_are_read(server, live, target, status):
    request = GET.replace(b"/health", target).replace(b"x\r\n", b"x\r\nConnection: close\r\n")
    with connect(live, request) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 %d " % status)


def test_connections_leave_spare_file_descriptors():
    assert max_connections(None, 1024) == 1024 - 64 - 32
    assert max_connections(100, 1024) == 100
    assert max_connections(5000, 1024) == 1024 - 64 - 32
    assert max_connections(None, 20) == 16
    assert max_connections(None, -1) > 10**6
