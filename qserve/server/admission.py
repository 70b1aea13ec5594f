"""Admission: how much may be under way at once, so that no crowd of clients fills the memory.

Knows numbers of outputs and tokens, no engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from qserve.server.errors import ApiError


class Admission:
    """Counts what is under way. What is too much gets 503: clients come again by themselves.

    A server that does nothing takes any request, so that none is refused for ever.
    """

    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self._limits = (max_outputs, max_tokens)
        self.held = (0, 0)  # outputs, and tokens of their prompts

    @contextmanager
    def admit(self, num_outputs: int, num_tokens: int) -> Iterator[None]:
        """Hold outputs, and tokens of their prompts, inside the block. Raises ApiError(503)."""
        held, asked = self.held, (num_outputs, num_tokens)
        after = tuple(map(sum, zip(held, asked, strict=True)))
        if any(held) and any(n > limit for n, limit in zip(after, self._limits, strict=True)):
            raise ApiError(
                503,
                f"The server is busy: {held[0]} outputs for {held[1]} prompt tokens are under way,"
                f" this request asks for {num_outputs} for {num_tokens}. Try again later.",
            )
        self.held = after
        try:
            yield
        finally:
            self.held = (self.held[0] - num_outputs, self.held[1] - num_tokens)
