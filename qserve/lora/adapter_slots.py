"""AdapterSlots: the adapter in each device slot, and the requests that use it."""

from collections.abc import Iterator
from typing import Protocol

from qserve.lora.adapter import Adapter


class AdaptedRequest(Protocol):
    """A request with an adapter. The engine's Request implements this."""

    adapter: Adapter | None
    adapter_slot: int

    @property
    def is_finished(self) -> bool: ...


class AdapterSlots:
    """The adapter slots. A slot can be reused when all requests that use its adapter have finished.

    Requests do not report their end. Finished requests are searched when a slot is needed.
    """

    def __init__(self, num_slots: int) -> None:
        self._adapters: list[Adapter | None] = [None] * num_slots
        self._users: list[set[AdaptedRequest]] = [set() for _ in range(num_slots)]
        self._last_use = [0] * num_slots
        self._num_uses = 0
        self._num_looked_at = 0  # number of users left by the last search

    def find(self, adapter: Adapter) -> int | None:
        """Return the slot that has an adapter, or None."""
        return next((i for i, each in enumerate(self._adapters) if each is adapter), None)

    def free(self) -> int | None:
        """Return an empty slot, or else the least recently used slot without users, or None."""
        self._look_for_finished()
        unused = [i for i, users in enumerate(self._users) if not users]
        empty = [i for i in unused if self._adapters[i] is None]
        return min(empty or unused, key=self._last_use.__getitem__, default=None)

    def put(self, slot: int, adapter: Adapter | None) -> None:
        assert not self._users[slot], "a request still needs what the slot holds"
        self._adapters[slot] = adapter

    def use(self, slot: int, request: AdaptedRequest) -> None:
        """Keep the slot's adapter until the request finishes."""
        self._num_uses += 1
        self._last_use[slot] = self._num_uses
        self._users[slot].add(request)
        request.adapter_slot = slot
        if sum(map(len, self._users)) > 2 * self._num_looked_at + 64:
            self._look_for_finished()

    def drop(self, adapter: Adapter) -> None:
        """Empty the slot of an unloaded adapter, if no request uses it."""
        slot = self.find(adapter)
        self._look_for_finished()
        if slot is not None and not self._users[slot]:
            self._adapters[slot] = None

    def held(self) -> Iterator[Adapter]:
        """Yield the adapters on the device."""
        return (adapter for adapter in self._adapters if adapter is not None)

    def in_use(self) -> Iterator[Adapter]:
        """Yield the adapters on the device that are used by a request."""
        self._look_for_finished()
        pairs = zip(self._adapters, self._users, strict=True)
        return (adapter for adapter, users in pairs if users and adapter is not None)

    def check_integrity(self) -> None:
        """Assert that no adapter has two slots and that each user has its adapter's slot."""
        held = list(self.held())
        assert len(held) == len(set(held)), "an adapter has two slots"
        for slot, (adapter, users) in enumerate(zip(self._adapters, self._users, strict=True)):
            for request in users:
                if not request.is_finished:
                    assert request.adapter is adapter and request.adapter_slot == slot, request

    def _look_for_finished(self) -> None:
        self._users = [
            {request for request in users if not request.is_finished} for users in self._users
        ]
        self._num_looked_at = sum(map(len, self._users))
