"""Turns: a few places for work, given to clients in turn. Knows no work."""

import asyncio
from collections import Counter, deque


class Turns:
    """`width` places. Who waits gets one in turn of clients, and of one client in order.

    Where there are several, one client never holds the last.
    """

    def __init__(self, width: int) -> None:
        self._num_free = width
        self._most_of_one = max(1, width - 1)
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future]] = {}  # by client; the first is next

    async def take(self, client: str) -> None:
        """Wait for a place. Whoever has one gives it back."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back(client)
            else:
                self._forget(client, place)
            raise

    def give_back(self, client: str) -> None:
        """Hand a place on to the next client's first that waits."""
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
            places = self._waiting.pop(client)
            places.popleft().set_result(None)
            self._num_free -= 1
            self._held[client] += 1
            if places:
                self._waiting[client] = places  # behind all others

    def _forget(self, client: str, place: asyncio.Future) -> None:
        places = self._waiting[client]
        places.remove(place)
        if not places:
            del self._waiting[client]
