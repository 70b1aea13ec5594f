"""Which adapter each slot of the device holds, and which requests need it. Knows no tensors."""

from collections.abc import Iterator

from qserve.engine.request import Request, Status
from qserve.lora.adapter import Adapter


class AdapterSlots:
    """A slot is another adapter's once every request that took it has finished.

    Nobody tells of an end: requests that have finished are looked for when a slot is wanted.
    """

    def __init__(self, num_slots: int) -> None:
        self._adapters: list[Adapter | None] = [None] * num_slots
        self._users: list[set[Request]] = [set() for _ in range(num_slots)]
        self._last_use = [0] * num_slots
        self._num_uses = 0
        self._num_looked_at = 0  # users when they were last looked at

    def find(self, adapter: Adapter) -> int | None:
        """The slot that holds an adapter."""
        return next((i for i, each in enumerate(self._adapters) if each is adapter), None)

    def free(self) -> int | None:
        """An empty slot, or of those that no request needs the one that was used longest ago."""
        self._look_for_finished()
        unused = [i for i, users in enumerate(self._users) if not users]
        empty = [i for i in unused if self._adapters[i] is None]
        return min(empty or unused, key=self._last_use.__getitem__, default=None)

    def put(self, slot: int, adapter: Adapter | None) -> None:
        assert not self._users[slot], "a request still needs what the slot holds"
        self._adapters[slot] = adapter

    def use(self, slot: int, request: Request) -> None:
        """Keep the slot's adapter until the request has finished."""
        self._num_uses += 1
        self._last_use[slot] = self._num_uses
        self._users[slot].add(request)
        request.adapter_slot = slot
        if sum(map(len, self._users)) > 2 * self._num_looked_at + 64:
            self._look_for_finished()

    def drop(self, adapter: Adapter) -> None:
        """Empty the slot of an adapter that nobody will ask for again, if nobody needs it now."""
        slot = self.find(adapter)
        self._look_for_finished()
        if slot is not None and not self._users[slot]:
            self._adapters[slot] = None

    def held(self) -> Iterator[Adapter]:
        """The adapters on the device."""
        return (adapter for adapter in self._adapters if adapter is not None)

    def in_use(self) -> Iterator[Adapter]:
        """Those of them that a request has."""
        self._look_for_finished()
        pairs = zip(self._adapters, self._users, strict=True)
        return (adapter for adapter, users in pairs if users and adapter is not None)

    def check_integrity(self) -> None:
        """Assert that no adapter stands twice, and that users have the slot they were told."""
        held = list(self.held())
        assert len(held) == len(set(held)), "an adapter stands in two slots"
        for slot, (adapter, users) in enumerate(zip(self._adapters, self._users, strict=True)):
            for request in users:
                if request.status is not Status.FINISHED:
                    assert request.adapter is adapter and request.adapter_slot == slot, request

    def _look_for_finished(self) -> None:
        self._users = [
            {request for request in users if request.status is not Status.FINISHED}
            for users in self._users
        ]
        self._num_looked_at = sum(map(len, self._users))
