"""uvicorn's HTTP/1.1 protocol with limits on connections, idle clients and slow readers.

A client's mistake gets a reply if possible, and at most one line in the log.
"""

import asyncio
import logging
import re
import resource
import socket
import sys
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qserve.server.http.errors import ApiError

IDLE_SECONDS = 30.0  # time limit for the head of a request, and between two requests
UNREAD_SECONDS = 120.0  # a client that reads nothing for this time is disconnected
LINGER_SECONDS = 5.0  # after a reply, the rest of the request is read and dropped for this time
# First and longest interval between probes of a half-closed client.
FIRST_PROBE_SECONDS, MAX_PROBE_SECONDS = 0.05, 5.0
HALF_CLOSED_SECONDS = 5.0  # time limit for the reply to a half-closed HTTP/1.0 client
REFUSED_SECONDS = 2.0  # a client that will be refused must send its request within this time
NUM_REFUSED = 32  # open connections beyond the limit that get a 503; others are just closed
# File descriptors for sockets of engine and workers, logs, listeners and files of libraries.
RESERVED_DESCRIPTORS = 64
FEWEST_CONNECTIONS = 16
# asyncio accepts up to this many connections before the protocol can count them.
ACCEPTED_AT_ONCE = 16
KERNEL_QUEUE = 2048  # connections that wait in the kernel to be accepted
TCP_CLOSE = 7  # state of a reset connection: the first byte of Linux' struct tcp_info
# A chunk of a body takes about 15 us, whatever its size, and one read returns up to 256 KiB.
SMALL_CHUNK = re.compile(rb"\r\n[0-9a-fA-F]{1,2}\r\n")  # header of a chunk below 256 bytes
NUM_SMALL_CHUNKS = 64  # allowed in one read

logger = logging.getLogger(__name__)


def max_connections(asked: int | None, descriptors: int) -> int:
    """Return the maximum number of open connections: `asked`, capped by the file descriptors."""
    if descriptors == resource.RLIM_INFINITY:
        descriptors = sys.maxsize
    room = max(FEWEST_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS - NUM_REFUSED)
    return room if asked is None else min(asked, room)


@dataclass(slots=True, kw_only=True)
class Connections:
    """State shared by all connections of a server."""

    limit: int
    # Connections without a complete request, oldest first. A dict keeps order and removes quickly.
    waiting: "dict[HttpProtocol, None]" = field(default_factory=dict)
    num_refused: int = 0  # open connections that got 503 or will get it


class HttpProtocol(H11Protocol):
    """One client's connection. `connections` are the counts that all connections share."""

    def __init__(self, *args, connections: Connections, **options) -> None:
        super().__init__(*args, **options)
        self._shared = connections
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._has_replied = False  # outside of any route
        self._is_half_closed = False  # the client has closed its sending side
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_LingeringTransport(transport, self))
        connection = transport.get_extra_info("socket")
        if self._is_reset():
            transport.abort()
            return
        if connection.family != socket.AF_UNIX:  # peers of Unix sockets cannot vanish
            _send_at_once(connection)
            _give_up_on_vanished_peers(connection)
        self._await_request()
        if len(self.connections) - self._shared.num_refused > self._shared.limit:
            self._make_room()

    def connection_lost(self, error: Exception | None) -> None:
        self._shared.num_refused -= self._is_refused
        self._is_refused = False
        self._shared.waiting.pop(self, None)
        _cancel(self._idle_timer)
        _cancel(self._unread_timer)
        _cancel(self._probe_timer)
        super().connection_lost(error)

    @property
    def is_mid_request(self) -> bool:
        """True if the client may still be sending data that will not be read."""
        return self._has_replied or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_reset():
            self.transport.abort()
            return
        if self._is_refused:
            self._reply(
                ApiError(503, "The server has reached its connection limit.", "Try again later.")
            )
            return
        if next(islice(SMALL_CHUNK.finditer(data), NUM_SMALL_CHUNKS, None), None):
            self._reply(
                ApiError(
                    400,
                    "expected larger chunks in the body, or a Content-Length header.",
                    "Send one of the two.",
                )
            )
            return
        super().data_received(data)
        self._look_at_request()

    def eof_received(self) -> bool:
        """Keep a half-closed connection open while the client may wait for a reply.

        TLS connections cannot be half-closed.
        """
        if self.scheme == "https" or not self._owes_answer:
            return False
        self._is_half_closed = True
        if self.scope["http_version"] == "1.1":
            self._probe_client(FIRST_PROBE_SECONDS)
        else:  # HTTP/1.0 has no interim responses
            self._probe_timer = self.loop.call_later(HALF_CLOSED_SECONDS, self.transport.abort)
        return True

    @property
    def _owes_answer(self) -> bool:
        """True if a whole request has arrived and its reply is not complete."""
        cycle = self.cycle
        return cycle is not None and not (cycle.more_body or cycle.response_complete)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and not self._owes_answer:
            self.transport.close()
        if not self.transport.is_closing():
            self._await_request()
            self._look_at_request()  # a pipelined request may have arrived

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._drop_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread_timer)

    def send_400_response(self, msg: str) -> None:
        """Send the JSON error instead of uvicorn's plain text."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        self._reply(
            ApiError(
                status,
                f"expected an HTTP/1.1 request: {error or msg}.",
                "Check the client, and that the URL begins with the server's scheme.",
            )
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: clients that offer HTTP/2 or a WebSocket are answered over HTTP/1.1.

        Java's client offers HTTP/2 on each connection. uvicorn would log two warnings, and advise
        to install a WebSocket library, which this server would not use.
        """

    def _is_reset(self) -> bool:
        """Return True if the client has reset the connection, and so will not read a reply.

        Data sent before the reset can still be read, and would start useless work.
        """
        connection = self.transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX or sys.platform != "linux":
            return False
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE

    def _probe_client(self, seconds: float) -> None:
        """Check whether a half-closed client is still connected, now and again after `seconds`.

        A client that closed its socket looks half-closed, too, but its system answers any data with
        a reset. The probe is an interim response, which every HTTP/1.1 client skips.
        """
        if self._is_reset():
            self.transport.abort()
            return
        if self._owes_answer and not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(
            seconds, self._probe_client, min(2 * seconds, MAX_PROBE_SECONDS)
        )

    def _await_request(self) -> None:
        """Wait for the next request. Until it is complete, this connection may be closed."""
        _cancel(self._idle_timer)
        self._shared.waiting.pop(self, None)
        self._shared.waiting[self] = None
        self._idle_timer = self.loop.call_later(IDLE_SECONDS, self._drop_idle)

    def _look_at_request(self) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        _cancel(self._idle_timer)  # the route limits the time of a body
        if not cycle.more_body:
            self._shared.waiting.pop(self, None)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request; refuse this one if none."""
        shared = self._shared
        oldest = next(iter(shared.waiting))
        if oldest is not self:
            oldest.transport.abort()
            # connection_lost is called later; more connections may be accepted until then.
            shared.waiting.pop(oldest, None)
            self.connections.discard(oldest)
        elif shared.num_refused >= NUM_REFUSED:
            self.transport.abort()
        else:
            shared.num_refused += 1
            self._is_refused = True
            shared.waiting.pop(self, None)
            _cancel(self._idle_timer)
            self._idle_timer = self.loop.call_later(REFUSED_SECONDS, self.transport.abort)
            logger.warning(
                "Connection limit reached (%d); refusing a client with 503", shared.limit
            )

    def _drop_idle(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"expected the head of a request within {IDLE_SECONDS:g} s."
            self._reply(ApiError(408, message, "Send the request again."))
        else:
            self.transport.close()

    def _drop_unread(self) -> None:
        logger.warning("Closing a connection: the client read nothing for %.0f s", UNREAD_SECONDS)
        self.transport.abort()

    def _reply(self, error: ApiError) -> None:
        """Send an error, unless a reply has begun, and close the connection."""
        _cancel(self._idle_timer)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._has_replied = True
        self.transport.write(raw_reply(error))
        self.transport.close()


class _LingeringTransport:
    """Transport that lets the client read the reply before the connection closes.

    If a socket is closed with unread input, the kernel sends a reset and the client loses the part
    of the reply that it has not read. So `close` shuts down the sending side first, and incoming
    data is dropped for LINGER_SECONDS.
    """

    def __init__(self, transport: asyncio.Transport, protocol: HttpProtocol) -> None:
        self._transport, self._protocol = transport, protocol
        self._lingers = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._protocol.is_mid_request:
            self._transport.close()
            return
        if not self._transport.can_write_eof():  # TLS connections cannot be half-closed
            self._transport.close()
            return
        self._lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._protocol.loop.call_later(LINGER_SECONDS, self._transport.abort)


def raw_reply(error: ApiError) -> bytes:
    """Return the bytes of an error response that closes the connection."""
    response = error.response
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    lines += [b"connection: close", b"", response.body]
    return b"\r\n".join(lines)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _send_at_once(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, which delays a chunk up to 40 ms, until the last one is confirmed.

    asyncio does so only for sockets whose `proto` is TCP. Sockets of an inherited listener may
    have none.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _give_up_on_vanished_peers(connection: socket.socket) -> None:
    """Let the kernel end a connection whose peer no longer answers or never reads."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(UNREAD_SECONDS * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
