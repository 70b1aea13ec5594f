"""PageServer: announces this rank's buffer to readers. PageConnection: the reader's end.

    server -> reader   MAGIC | nonce
    reader -> server   nonce | HMAC of both nonces
    server -> reader   length | Announcement (JSON) | HMAC of both nonces and the announcement

The HMACs use the engines' secret. Nothing more is sent; the connection stays open while both ends
are alive.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import threading

import msgspec

from formats.errors import InputError, one_line
from qserve.kv_transfer.config import FLAG
from qserve.kv_transfer.nixl.agent import Region
from qserve.kv_transfer.nixl.settings import Address
from qserve.kv_transfer.peer.layout import BufferFacts

MAGIC = b"qserveN1"
NONCE_BYTES = DIGEST_BYTES = 32
MAX_BYTES = 2**24  # maximum size of an announcement
TALK_SECONDS = 2.0  # timeout of the handshake
MAX_TALKS = 64  # maximum number of open connections
KEEPALIVE = (  # detects a dead host after 25 s
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 10),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
)

logger = logging.getLogger(__name__)


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one rank's buffer, with which a reader can read it."""

    facts: BufferFacts
    metadata: bytes  # of the NIXL agent
    pages: Region
    table: Region


class ConnectionRefused(Exception):
    """The other end is not an engine, or has another secret."""


class PageServer:
    """Listens for readers in a thread, and sends them the announcement."""

    def __init__(self, address: Address, announcement: Announcement, secret: bytes) -> None:
        """Start listening. Raises InputError."""
        self._secret, self._text = secret, msgspec.json.encode(announcement)
        host, port = address
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server(address, family=family)
        except OSError as error:
            raise InputError(
                f"{FLAG} host",
                f"{host}:{port} cannot be listened on: {one_line(error)}",
                "specify an address of this host and ports that are free",
            ) from error
        self.address: Address = host, self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._readers: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="kv-announce", daemon=True).start()

    def close(self) -> None:
        """Close all connections, by which readers notice that the buffer is gone."""
        with self._lock:
            self._is_closed = True
            readers = list(self._readers)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up the thread
        self._socket.close()
        for each in readers:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            with self._lock:
                is_full = len(self._readers) >= MAX_TALKS
                if not is_full and not self._is_closed:
                    self._readers.add(reader)
            if is_full or self._is_closed:
                reader.close()
                continue
            threading.Thread(target=self._talk, args=(reader,), daemon=True).start()

    def _talk(self, reader: socket.socket) -> None:
        """Send the announcement to a reader, and wait until the reader disconnects."""
        try:
            with reader:
                reader.settimeout(TALK_SECONDS)
                nonce = secrets.token_bytes(NONCE_BYTES)
                reader.sendall(MAGIC + nonce)
                answer = _receive(reader, NONCE_BYTES + DIGEST_BYTES)
                nonces = nonce + answer[:NONCE_BYTES]
                if not hmac.compare_digest(answer[NONCE_BYTES:], self._digest(b"read", nonces)):
                    logger.warning("KV reader %s was refused: its secret differs", _name(reader))
                    return
                digest = self._digest(b"page", nonces + self._text)
                reader.sendall(len(self._text).to_bytes(8, "little") + self._text + digest)
                _keep_alive(reader)
                reader.settimeout(None)
                reader.recv(1)  # returns when the reader disconnects
        except (OSError, ConnectionRefused):
            pass  # readers may disconnect at any time
        finally:
            with self._lock:
                self._readers.discard(reader)

    def _digest(self, purpose: bytes, data: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + data, "sha256")


class PageConnection:
    """A reader's connection to the PageServer of another engine's rank."""

    def __init__(self, address: Address, secret: bytes) -> None:
        """Connect and receive the announcement. Raises OSError or ConnectionRefused."""
        self._socket = socket.create_connection(address, TALK_SECONDS)
        try:
            head = _receive(self._socket, len(MAGIC) + NONCE_BYTES)
            if not head.startswith(MAGIC):
                raise ConnectionRefused("is no engine that sends KV pages")
            nonces = head[len(MAGIC) :] + (nonce := secrets.token_bytes(NONCE_BYTES))
            self._socket.sendall(nonce + hmac.digest(secret, b"read" + nonces, "sha256"))
            try:
                length = int.from_bytes(_receive(self._socket, 8), "little")
            except ConnectionRefused:
                raise ConnectionRefused("has another secret_file") from None
            if length > MAX_BYTES:
                raise ConnectionRefused("is no engine that sends KV pages")
            text = _receive(self._socket, length)
            digest = hmac.digest(secret, b"page" + nonces + text, "sha256")
            if not hmac.compare_digest(_receive(self._socket, DIGEST_BYTES), digest):
                raise ConnectionRefused("has another secret_file")
            try:
                self.announcement = msgspec.json.decode(text, type=Announcement)
            except msgspec.MsgspecError as error:
                raise ConnectionRefused(f"has no valid description: {error}") from None
            _keep_alive(self._socket)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    @property
    def is_alive(self) -> bool:
        """True while the other engine is alive."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()


def _receive(end: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raises OSError or ConnectionRefused."""
    found = bytearray()
    while len(found) < count:
        data = end.recv(count - len(found))
        if not data:
            raise ConnectionRefused("closed the connection")
        found += data
    return bytes(found)


def _keep_alive(end: socket.socket) -> None:
    for option, level, value in KEEPALIVE:
        end.setsockopt(level, option, value)


def _name(end: socket.socket) -> str:
    host, port = end.getpeername()[:2]
    return f"{host}:{port}"
