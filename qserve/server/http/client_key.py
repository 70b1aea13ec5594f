"""Identity of a client for fair sharing: a digest of its address, which names no person.

The identity is not the API key, since all clients may use the same key. A client cannot have many
addresses.
"""

import hashlib
import ipaddress

from starlette.types import Scope

# The owner of an IPv6 address usually has all 2**64 of its network.
IPV6_NETWORK_BITS = 64


def client_key(scope: Scope) -> str:
    """Name of a connection's client, the same for all of its connections."""
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
