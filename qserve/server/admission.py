"""Admission: how much may be under way at once, so that no crowd of clients fills the memory.

Knows numbers of outputs and tokens, no engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qserve.server.budget import Budget
from qserve.server.errors import ApiError


class Admission:
    """Counts what is under way. What is too much gets 503: clients come again by themselves.

    A server that does nothing takes any request, so that none is refused for ever. One client alone
    cannot take all: see Budget.
    """

    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self._budgets = (Budget(max_outputs), Budget(max_tokens))
        # called with the place of what is too much in `held`
        self.on_rejection: Callable[[int], None] = lambda index: None

    @property
    def held(self) -> tuple[int, int]:
        """Outputs, and tokens of their prompts."""
        return tuple(budget.held for budget in self._budgets)

    @contextmanager
    def admit(self, client: str, num_outputs: int, num_tokens: int) -> Iterator[None]:
        """Hold outputs, and tokens of their prompts, inside the block. Raises ApiError(503)."""
        held, holds = self.held, []
        try:
            for index, amount in enumerate((num_outputs, num_tokens)):
                hold = self._budgets[index].take(client, amount)
                if hold is None:
                    self.on_rejection(index)
                    raise ApiError(
                        503,
                        f"The server is busy: {held[0]} outputs for {held[1]} prompt tokens are"
                        f" under way, this request asks for {num_outputs} for {num_tokens}."
                        " Try again later.",
                    )
                holds.append(hold)
            yield
        finally:
            for hold in holds:
                hold.give_back()
