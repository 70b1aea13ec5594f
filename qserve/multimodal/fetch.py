"""Fetching of media over http or https, only from allowed hosts and only from checked addresses.

Each hop resolves the host's name once and checks every address found. The connection goes to the
checked address. A redirect is a new URL, which is checked like the first one.
"""

import http.client
import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from formats.errors import InputError
from qserve.multimodal.settings import FLAG, AllowedHost, MediaLimits

PORTS = {"http": 80, "https": 443}
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
SLICE_BYTES = 2**16
HEADERS = {"Accept": "image/*, video/*", "Accept-Encoding": "identity", "User-Agent": "qserve"}
# Networks whose addresses contain another address, which may not be public. IPv4-mapped addresses
# are checked separately.
TUNNELS = tuple(
    map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96"))
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchError(InputError):
    """Error about a file that could not be fetched."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__("media URL", problem, remedy or "send it as a data: URL")


def fetch(url: str, limits: MediaLimits, ends: float, kind: str = "image") -> bytes:
    """Return the bytes of the file at a URL, after redirects. Raises FetchError.

    `ends`: deadline, as a value of time.monotonic(). `kind`: one of settings.KINDS.
    """
    for _ in range(MAX_REDIRECTS + 1):
        parts, host, port = _checked_url(url, limits.hosts)
        address = _checked_address(host, port, limits.hosts, ends)
        try:
            found = _get(parts, host, port, address, limits.num_bytes(kind), ends)
        except FetchError:
            raise
        except (OSError, http.client.HTTPException, ValueError):
            # The reason is left out: it would reveal open ports in the server's network.
            raise FetchError(f"{host:.100} did not send it, or not in time") from None
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise FetchError(f"has more than {MAX_REDIRECTS} redirects")


def _checked_url(url: str, hosts: Sequence[AllowedHost]) -> tuple[SplitResult, str, int]:
    """Return a URL's parts, host and port. Raises FetchError."""
    if len(url) > MAX_URL_CHARS:
        raise FetchError(f"expected at most {MAX_URL_CHARS} characters, found {len(url)}")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        if not host.isascii():
            host = host.encode("idna").decode()
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:  # also UnicodeError of idna
        raise FetchError("is not valid") from None
    if parts.scheme not in PORTS or not host:
        raise FetchError(f"expected http or https and a host, found {url[:100]!r}")
    if "@" in parts.netloc:
        raise FetchError("has a user name, which is not sent", "remove it")
    if not any(each.matches(host, port) for each in hosts):
        raise FetchError(
            f"{host:.100}, port {port}, is not allowed by {FLAG}",
            "send it as a data: URL, or have the host added to the flag",
        )
    return parts, host, port


def _checked_address(host: str, port: int, hosts: Sequence[AllowedHost], ends: float) -> str:
    """Resolve a host. Raises FetchError unless all of its addresses may be used."""
    addresses = _resolve(host, port, ends)
    if not addresses:
        raise FetchError(f"{host:.100} has no address")
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        is_listed = any(each.host == str(address) for each in hosts)
        if not (is_listed or is_public(address)):
            raise FetchError(
                f"{host:.100} has an address that is not public",
                f"send it as a data: URL, or have the address added to {FLAG}",
            )
    return addresses[0]


def is_public(address: Address) -> bool:
    """Return True for an address of the public network that contains no other address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in TUNNELS):
            return False
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified
    )


def _resolve(host: str, port: int, ends: float) -> list[str]:
    """Return the addresses of a host; [] if it has none, or if resolving takes too long."""
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.put([str(info[4][0]) for info in infos])
        except (OSError, UnicodeError):
            found.put([])

    # getaddrinfo has no time limit, so it runs in a thread that ends whenever the call does.
    threading.Thread(target=look_up, daemon=True, name="resolver").start()
    try:
        return found.get(timeout=max(0.0, ends - time.monotonic()))
    except queue.Empty:
        return []


def _get(
    parts: SplitResult, host: str, port: int, address: str, max_bytes: int, ends: float
) -> bytes | str:
    """Send a request. Return the body, or the URL of a redirect."""
    seconds = ends - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    plain = socket.create_connection((address, port), timeout=seconds)
    # The socket's own timeout restarts with each byte that arrives, so a timer ends the connection.
    is_late = threading.Event()
    watchdog = threading.Timer(max(0.0, ends - time.monotonic()), _cut, [plain, is_late])
    watchdog.daemon = True
    watchdog.start()
    connection: http.client.HTTPConnection | None = None
    try:
        connection = CONNECTIONS[parts.scheme](host, port)
        connection.sock = plain
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(
                plain, server_hostname=host, do_handshake_on_connect=False
            )
            watchdog.args = [connection.sock, is_late]
            connection.sock.do_handshake()
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
        connection.request("GET", f"{path}?{query}" if query else path, headers=HEADERS)
        with connection.getresponse() as response:
            found = _body(response, host, max_bytes)
        if is_late.is_set():  # a connection that was ended looks like the end of a response
            raise TimeoutError
        return found
    except FetchError:
        if is_late.is_set():
            raise TimeoutError from None
        raise
    finally:
        watchdog.cancel()
        if connection is not None:
            connection.close()
        plain.close()


def _cut(connection: socket.socket, is_late: threading.Event) -> None:
    """End a connection from which another thread is reading."""
    is_late.set()
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _body(response: http.client.HTTPResponse, host: str, max_bytes: int) -> bytes | str:
    if response.status in REDIRECTS and (location := response.getheader("Location")):
        return location
    if response.status != 200:
        raise FetchError(f"{host:.100} answered with status {response.status}")
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise FetchError(f"{host:.100} sent it with a Content-Encoding, which is not supported")
    stated = response.getheader("Content-Length", "")
    body = bytearray()
    is_large = stated.isdecimal() and int(stated[:19]) > max_bytes
    while not is_large and (piece := response.read1(SLICE_BYTES)):
        body += piece
        is_large = len(body) > max_bytes
    if is_large:
        raise FetchError(f"has more than {max_bytes} bytes", "send a smaller file")
    if stated.isdecimal() and len(body) != int(stated[:19]):
        raise FetchError(f"{host:.100} sent {len(body)} bytes of {int(stated[:19])}")
    return bytes(body)
