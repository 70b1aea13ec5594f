"""An amount that the clients of a server share fairly."""

from collections import Counter

RESERVE = 8  # the reserve is the limit divided by this


class Budget:
    """Counts amounts that clients hold. An eighth is reserved for clients that hold nothing else.

    The rest is first come, first served. A client may hold more than the limit if nothing of the
    rest is held, so that no request is refused forever.
    """

    def __init__(self, limit: int) -> None:
        self._reserve = limit // RESERVE
        self._common = limit - self._reserve
        self._held: Counter[str] = Counter()  # by client, without the reserve
        self._held_of_reserve = 0
        self._num_common = 0

    @property
    def held(self) -> int:
        return self._num_common + self._held_of_reserve

    def take(self, client: str, amount: int) -> "Hold | None":
        """Hold an amount until it is given back; None if there is no room."""
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
