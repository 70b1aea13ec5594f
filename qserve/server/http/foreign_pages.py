"""Protects a server without API keys against web pages of other sites.

A web page can make its visitor's browser send requests, also to addresses that only the visitor can
reach. The header `Origin` names the page's site. A site can also point its own name at the address
of this server (DNS rebinding). Then the browser takes the page for one of this server, and only the
name in `Host` reveals the attack. So a server without keys refuses other origins, and host names
that a site on the internet could have.
"""

import ipaddress
import re
import socket
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from qserve.config import ServerConfig
from qserve.server.http.api_key import OPEN
from qserve.server.http.errors import ApiError

ANY = "*"
# Domains without sites on the internet, by RFC 6761, RFC 6762, RFC 8375 and ICANN (.internal).
# They include Kubernetes' cluster.local.
PRIVATE_DOMAINS = (".localhost", ".local", ".home.arpa", ".internal")
AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:@/]*)(?::([0-9]*))?")
DEFAULT_PORTS = {"http": "80", "https": "443"}


class RefuseForeignPages:
    """ASGI middleware that answers 403 to pages of other origins and to unknown host names.

    Health probes are exempt: they return no data, and load balancers may send any host name.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        """Set the host names to accept (`*.example.com`: all subdomains) and the origins."""
        self._app = app
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path not in OPEN:
            error = self._error(scope)
            if error is not None:
                await error.response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        host, port = _split(headers.get(b"host", ""))
        if not self._knows(host):
            return ApiError(
                403,
                f"Host: expected an IP address, localhost, or a name of this server, found"
                f" {host!r}. Without API keys other names are refused, since any web page could use"
                f" one (DNS rebinding).",
                f"Start the server with --allowed-hosts {host}, or with --api-key.",
            )
        origin = headers.get(b"origin")
        if origin is None or self._allows(origin):
            return None
        # Only browsers can set this header. Over plain HTTP, they send it to localhost only.
        if headers.get(b"sec-fetch-site") == "same-origin":
            return None
        scheme, _, authority = origin.partition("://")
        default = DEFAULT_PORTS.get(scheme)
        name, its_port = _split(authority)
        # A proxy may terminate TLS for this server, so the schemes may differ.
        if name == host and (its_port or default) == (port or default) and default and name:
            return None
        return ApiError(
            403,
            f"Origin: web pages of {origin} may not call this server, which has no API keys.",
            f"Start the server with --allowed-origins {origin}, or with --api-key.",
        )

    def _allows(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins

    def _knows(self, host: str) -> bool:
        name = host.rstrip(".")
        # Names without a dot, such as container names, resolve on the local network only.
        if "." not in name and ":" not in name:
            return True
        if name.endswith(PRIVATE_DOMAINS) or name in self._hosts or ANY in self._hosts:
            return True
        if _is_address(name):
            return True
        parents = name.split(".")[1:]
        return any("*." + ".".join(parents[i:]) in self._hosts for i in range(len(parents)))


def hosts_of(config: ServerConfig) -> tuple[str, ...]:
    """Return the host names of this server: the machine's, --host and --allowed-hosts."""
    if config.uds is not None:  # browsers cannot reach it, and a proxy may forward any name
        return (ANY,)
    return (socket.gethostname(), config.host, *config.allowed_hosts)


def _split(authority: str) -> tuple[str, str]:
    """Split `host:port`. A malformed value is returned whole as the host."""
    found = AUTHORITY.fullmatch(authority.strip())
    return (found[1], found[2] or "") if found else (authority, "")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
