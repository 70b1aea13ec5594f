"""Clients of a server, who share it fairly: their identity, and turns among them.

The identity is a digest of the address, which names no person. It is not the API key, since all
clients may use the same key. A client cannot have many addresses.
"""

import asyncio
import hashlib
import ipaddress
from collections import Counter, deque

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


class Turns:
    """Semaphore of `width` slots: round-robin over clients, in order of arrival within a client.

    If there are several slots, one client never holds all of them.
    """

    def __init__(self, width: int) -> None:
        self._num_free = width
        self._most_of_one = max(1, width - 1)
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future]] = {}  # by client; the first client is next

    async def take(self, client: str) -> None:
        """Wait for a slot. The caller must give it back."""
        slot = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(slot)
        self._hand_out()
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.give_back(client)
            else:
                self._forget(client, slot)
            raise

    def give_back(self, client: str) -> None:
        """Pass a slot to the next waiting client."""
        self._num_free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._hand_out()

    def _hand_out(self) -> None:
        for client in list(self._waiting):
            if not self._num_free:
                return
            if self._held[client] >= self._most_of_one:
                continue
            slots = self._waiting.pop(client)
            slots.popleft().set_result(None)
            self._num_free -= 1
            self._held[client] += 1
            if slots:
                self._waiting[client] = slots  # after all others

    def _forget(self, client: str, slot: asyncio.Future) -> None:
        slots = self._waiting[client]
        slots.remove(slot)
        if not slots:
            del self._waiting[client]
