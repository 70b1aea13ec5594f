"""Connections within limits: how many there are, how long they idle, whether they read.

`HttpProtocol` is uvicorn's with these limits; it knows no routes. What a client does wrong gets a
reply where one is possible, and costs a line in the log at most.
"""

import asyncio
import contextlib
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

from qserve.server.errors import ApiError

IDLE_SECONDS = 30.0  # for the head of a request, and between two
UNREAD_SECONDS = 120.0  # that a client may leave unread what waits for it
LINGER_SECONDS = 5.0  # that the rest of a request is read and dropped after its answer
REFUSED_SECONDS = 2.0  # for the request of a client that is then refused
NUM_REFUSED = 32  # connections that are answered with 503; more are closed without a word
# Beside connections: the engine's and the worker's sockets, logs, listeners, libraries' files.
RESERVED_DESCRIPTORS = 64
FEWEST_CONNECTIONS = 16
# Connections taken from the kernel's queue at once: they are counted only after that.
ACCEPTED_AT_ONCE = 16
KERNEL_QUEUE = 2048
# Each chunk of a body costs some 15 us, whatever its size, and a read brings up to 256 KiB.
SMALL_CHUNK = re.compile(rb"\r\n[0-9a-fA-F]{1,2}\r\n")  # of less than 256 bytes
NUM_SMALL_CHUNKS = 64  # in one read

logger = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of file descriptors as far as it may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_connections(asked: int | None, descriptors: int) -> int:
    """How many connections may be open: what is asked for, within what descriptors allow."""
    if descriptors == resource.RLIM_INFINITY:
        descriptors = sys.maxsize
    room = max(FEWEST_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS - NUM_REFUSED)
    return room if asked is None else min(asked, room)


@dataclass(slots=True, kw_only=True)
class Connections:
    """The limits of all connections of a server, and those that wait for their client."""

    limit: int
    # No request of theirs has come whole, oldest first. A dict, for its order and quick removal.
    waiting: "dict[HttpProtocol, None]" = field(default_factory=dict)
    num_refused: int = 0  # open ones that are or will be answered with 503


class HttpProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args, connections: Connections, **options) -> None:
        super().__init__(*args, **options)
        self._shared = connections
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._has_replied = False  # outside of any route

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_LingeringTransport(transport, self))
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:  # whose peers cannot vanish
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
        super().connection_lost(error)

    @property
    def is_mid_request(self) -> bool:
        """Whether the client may still be sending what nobody will read."""
        return self._has_replied or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_refused:
            self._reply(
                ApiError(503, "The server has as many connections as it can hold. Try again later.")
            )
            return
        if next(islice(SMALL_CHUNK.finditer(data), NUM_SMALL_CHUNKS, None), None):
            self._reply(ApiError(400, "expected a body in larger chunks, or with Content-Length."))
            return
        super().data_received(data)
        self._look_at_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._await_request()
            self._look_at_request()  # of a client that does not wait for the answer

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._drop_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread_timer)

    def send_400_response(self, msg: str) -> None:
        """The envelope in place of uvicorn's plain text."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        self._reply(ApiError(status, f"expected an HTTP/1.1 request: {error or msg}."))

    def _await_request(self) -> None:
        """The client has its turn: until its next request is whole it may be hung up on."""
        _cancel(self._idle_timer)
        self._shared.waiting.pop(self, None)
        self._shared.waiting[self] = None
        self._idle_timer = self.loop.call_later(IDLE_SECONDS, self._drop_idle)

    def _look_at_request(self) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        _cancel(self._idle_timer)  # how long a body may take is the route's to say
        if not cycle.more_body:
            self._shared.waiting.pop(self, None)

    def _make_room(self) -> None:
        """Hang up on the client that has been silent for longest, else refuse this one."""
        shared = self._shared
        oldest = next(iter(shared.waiting))
        if oldest is not self:
            oldest.transport.abort()
            # connection_lost comes later, and others may be accepted before.
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
            logger.warning("%d connections are open: a client gets 503", shared.limit)

    def _drop_idle(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"expected the head of a request within {IDLE_SECONDS:g} s."
            self._reply(ApiError(408, message))
        else:
            self.transport.close()

    def _drop_unread(self) -> None:
        logger.warning("A client read nothing for %.0f s: its connection is cut", UNREAD_SECONDS)
        self.transport.abort()

    def _reply(self, error: ApiError) -> None:
        """Answer outside of any route, where no answer has begun, and hang up."""
        _cancel(self._idle_timer)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._has_replied = True
        self.transport.write(raw_reply(error))
        self.transport.close()


class _LingeringTransport:
    """A transport whose end does not cost the client its answer.

    Where a socket is closed with bytes unread, the kernel tells the client to throw away what it
    has not read either. So the sending end is closed first, and what comes is dropped for a while.
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
        if not self._transport.can_write_eof():  # TLS has no half of a connection
            self._transport.close()
            return
        self._lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._protocol.loop.call_later(LINGER_SECONDS, self._transport.abort)


def raw_reply(error: ApiError) -> bytes:
    """The bytes of an answer after which the connection ends."""
    response = error.response
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    lines += [b"connection: close", b"", response.body]
    return b"\r\n".join(lines)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _send_at_once(connection: socket.socket) -> None:
    """Let no chunk wait until the client has acknowledged the one before, 40 ms later.

    asyncio does this for sockets that name their protocol; those of a listener that was made by
    others, or inherited, need not.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _give_up_on_vanished_peers(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other end no longer answers, or never reads."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(UNREAD_SECONDS * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
