"""NixlSettings: the settings in kv_connector_extra_config for the connector `nixl`."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG
from qserve.kv_transfer.peer.settings import KEYS as COMMON_KEYS
from qserve.kv_transfer.peer.settings import PeerSettings
from qserve.kv_transfer.secret import read_secret

KEYS = ("host", "port", "peers", "secret_file", "backend")
LOCAL = "127.0.0.1"
Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlSettings:
    """How engines find each other, and how NIXL connects them."""

    common: PeerSettings
    host: str = LOCAL  # address to which other engines connect
    port: int = 0  # port of rank 0; rank r listens on port + r. 0: any free port
    peers: tuple[Address, ...] = ()  # addresses of rank 0 of engines on other hosts
    secret: bytes = b""
    backend: str = "UCX"  # NIXL backend

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "NixlSettings":
        """Parse the settings. Raises InputError."""
        if unknown := extra.keys() - {*COMMON_KEYS, *KEYS}:
            raise InputError(
                f"{FLAG} kv_connector_extra_config",
                f"has unknown keys: {', '.join(sorted(unknown))}",
                f"known keys: {', '.join((*COMMON_KEYS, *KEYS))}",
            )
        common = PeerSettings.parse({k: v for k, v in extra.items() if k in COMMON_KEYS})
        host, port = extra.get("host", LOCAL), extra.get("port", 0)
        peers, backend = extra.get("peers", []), extra.get("backend", "UCX")
        if not isinstance(host, str) or not host:
            raise InputError(
                f"{FLAG} host",
                f"expected a name or address, found {host!r}",
                "give the address at which the other engines reach this host",
            )
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
            raise InputError(
                f"{FLAG} port",
                f"expected 0 to 65535, found {port!r}",
                "leave it out for a free port",
            )
        if not isinstance(peers, list):
            raise InputError(
                f"{FLAG} peers",
                f'expected a list of "host:port", found {peers!r}',
                'for example "peers": ["10.0.0.2:5600"]',
            )
        if not isinstance(backend, str) or not backend:
            raise InputError(
                f"{FLAG} backend",
                f"expected a NIXL backend, found {backend!r}",
                "leave it out for UCX",
            )
        secret = read_secret(extra.get("secret_file"))
        if not secret and not _is_local(host):
            raise InputError(
                f"{FLAG} host",
                f"{host} needs secret_file: others could read the pages of prompts",
                "write a secret of 16 to 64 bytes to a file on both hosts, or use 127.0.0.1",
            )
        return cls(
            common=common,
            host=host,
            port=port,
            peers=tuple(_address(each) for each in peers),
            secret=secret,
            backend=backend,
        )


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(text: object) -> Address:
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InputError(
            f"{FLAG} peers",
            f'expected "host:port", found {text!r}',
            'for example "peers": ["10.0.0.2:5600"]',
        )
    return host, int(port)
