"""Admission control: limits on outputs and prompt tokens that are running or queued."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qserve.server.http.budget import Budget
from qserve.server.http.errors import ApiError


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
