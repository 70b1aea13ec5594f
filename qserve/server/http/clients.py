"""Fair sharing of a server between clients: identity, turns, budgets, admission.

A client is identified by a digest of its address, so that no address is stored. The API key would
not do: all clients may use the same key, whereas a client cannot easily have many addresses.
"""

import asyncio
import hashlib
import ipaddress
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from qserve.server.http.errors import ApiError

# The owner of an IPv6 address usually owns all 2**64 addresses of its /64 network.
IPV6_NETWORK_BITS = 64


def client_key(scope: Scope) -> str:
    """Return the id of a connection's client, the same for all connections of the client."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        network = host  # not an address: a proxy may send any text
    else:
        if address.version == 6 and address.ipv4_mapped is None:
            network = str(ipaddress.ip_network((int(address), IPV6_NETWORK_BITS), strict=False))
        else:
            network = str(getattr(address, "ipv4_mapped", None) or address)
    return hashlib.sha256(network.encode(errors="replace")).hexdigest()[:16]


class Turns:
    """Semaphore with `width` slots, round-robin over clients, first come first served per client.

    If `width` is more than 1, one client never holds all slots.
    """

    def __init__(self, width: int) -> None:
        self._num_free = width
        self._max_per_client = max(1, width - 1)
        self._held: Counter[str] = Counter()
        # client -> its waiting requests; clients are in the order of their turns
        self._waiting: dict[str, deque[asyncio.Future]] = {}

    async def take(self, client: str) -> None:
        """Wait for a slot. The caller must call `give_back`."""
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
        """Release a slot; the next waiting client gets it."""
        self._num_free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._hand_out()

    def _hand_out(self) -> None:
        for client in list(self._waiting):
            if not self._num_free:
                return
            if self._held[client] >= self._max_per_client:
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


RESERVE = 8  # one part in RESERVE of a budget is reserved


class Budget:
    """Limit on the total amount that clients hold. An eighth is reserved for clients with nothing.

    The other seven eighths, the common part, are first come, first served. If nothing of the common
    part is held, a client may hold any amount, so that no request is refused forever.
    """

    def __init__(self, limit: int) -> None:
        self._reserve = limit // RESERVE
        self._common = limit - self._reserve
        self._held: Counter[str] = Counter()  # client -> amount of the common part
        self._held_of_reserve = 0
        self._num_common = 0

    @property
    def held(self) -> int:
        return self._num_common + self._held_of_reserve

    def take(self, client: str, amount: int) -> "Hold | None":
        """Take an amount, until `Hold.give_back`. Returns None if the budget is exhausted."""
        if not self._num_common or self._num_common + amount <= self._common:
            self._num_common += amount
            self._held[client] += amount
            return Hold(self, client, amount, from_reserve=False)
        if not self._held[client] and self._held_of_reserve + amount <= self._reserve:
            self._held_of_reserve += amount
            return Hold(self, client, amount, from_reserve=True)
        return None


class Hold:
    """An amount of a budget that one client holds."""

    def __init__(self, budget: Budget, client: str, amount: int, *, from_reserve: bool) -> None:
        self._budget, self._client, self._amount = budget, client, amount
        self._from_reserve = from_reserve

    def give_back(self) -> None:
        budget, amount, self._amount = self._budget, self._amount, 0
        if self._from_reserve:
            budget._held_of_reserve -= amount
            return
        budget._num_common -= amount
        budget._held[self._client] -= amount
        if not budget._held[self._client]:
            del budget._held[self._client]


class Admission:
    """Limits running and queued work. Requests beyond the limits get 503, which clients retry.

    An idle server accepts any request, so that no request is refused forever. One client cannot
    take the whole capacity: see Budget.
    """

    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self._budgets = (Budget(max_outputs), Budget(max_tokens))
        # called with the index (in `held`) of the limit that was exceeded
        self.on_rejection: Callable[[int], None] = lambda index: None

    @property
    def held(self) -> tuple[int, int]:
        """Number of running and queued outputs, and of prompt tokens of these outputs."""
        return tuple(budget.held for budget in self._budgets)

    @contextmanager
    def admit(self, client: str, num_outputs: int, num_tokens: int) -> Iterator[None]:
        """Count outputs and prompt tokens inside the `with` block. Raises ApiError(503)."""
        held, holds = self.held, []
        try:
            for index, amount in enumerate((num_outputs, num_tokens)):
                hold = self._budgets[index].take(client, amount)
                if hold is None:
                    self.on_rejection(index)
                    raise ApiError(
                        503,
                        f"The server is busy: {held[0]} outputs with {held[1]} prompt tokens are"
                        f" running or queued; this request adds {num_outputs} with {num_tokens}.",
                        "Try again later.",
                    )
                holds.append(hold)
            yield
        finally:
            for hold in holds:
                hold.give_back()
