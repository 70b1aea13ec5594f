"""A semaphore that is fair between clients."""

import asyncio
from collections import Counter, deque


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
