"""Turns: a few places for work, given to clients in turn. Knows no work."""

import asyncio
from collections import deque


class Turns:
    """`width` places. Who waits gets one in turn of clients, and of one client in order."""

    def __init__(self, width: int) -> None:
        self._num_free = width
        self._waiting: dict[str, deque[asyncio.Future]] = {}  # by client; the first is next

    async def take(self, client: str) -> None:
        """Wait for a place. Whoever has one gives it back."""
        if self._num_free:
            self._num_free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Hand a place on to the next client's first that still waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            places = self._waiting.pop(client)
            while places and places[0].done():  # gave up waiting
                places.popleft()
            if places:
                places.popleft().set_result(None)
                if places:
                    self._waiting[client] = places  # behind all others
                return
        self._num_free += 1
