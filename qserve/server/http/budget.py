"""Limits that the clients of a server share fairly: Budget, and Admission of outputs."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qserve.server.http.errors import ApiError

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


class Admission:
    """Counts running and queued work. Requests beyond the limits get 503, which clients retry.

    An idle server accepts any request, so that none is refused forever. One client cannot take all
    of the capacity: see Budget.
    """

    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self._budgets = (Budget(max_outputs), Budget(max_tokens))
        # called with the index in `held` of the exceeded limit
        self.on_rejection: Callable[[int], None] = lambda index: None

    @property
    def held(self) -> tuple[int, int]:
        """Number of outputs, and of tokens in their prompts."""
        return tuple(budget.held for budget in self._budgets)

    @contextmanager
    def admit(self, client: str, num_outputs: int, num_tokens: int) -> Iterator[None]:
        """Hold outputs and prompt tokens inside the block. Raises ApiError(503)."""
        held, holds = self.held, []
        try:
            for index, amount in enumerate((num_outputs, num_tokens)):
                hold = self._budgets[index].take(client, amount)
                if hold is None:
                    self.on_rejection(index)
                    raise ApiError(
                        503,
                        f"The server is busy: {held[0]} outputs with {held[1]} prompt tokens are"
                        f" running or queued; this request adds {num_outputs} with {num_tokens}."
                        " Try again later.",
                    )
                holds.append(hold)
            yield
        finally:
            for hold in holds:
                hold.give_back()
