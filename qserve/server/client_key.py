"""Whose request it is, for fair shares and turns: a short name that tells nothing about a person.

Clients that send one key share an address often, and one key may be used by all. So it is the
address, of which one client cannot have many.
"""

import hashlib
import ipaddress

from starlette.types import Scope

# Who has an IPv6 address has all 2**64 of its network.
IPV6_NETWORK_BITS = 64


def client_key(scope: Scope) -> str:
    """The name of the client behind a connection, the same for all of its connections."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        network = host  # a proxy may send any text
    else:
        if address.version == 6 and address.ipv4_mapped is None:
            network = str(ipaddress.ip_network((int(address), IPV6_NETWORK_BITS), strict=False))
        else:
            network = str(getattr(address, "ipv4_mapped", None) or address)
    return hashlib.sha256(network.encode(errors="replace")).hexdigest()[:16]
