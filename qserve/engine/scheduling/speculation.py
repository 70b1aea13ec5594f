"""Speculation: the scheduler's interface to speculative decoding (qserve/speculation)."""

from collections.abc import Iterable
from typing import Protocol

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import Chunk, Drafting, StepPlan


class Speculation(Protocol):
    """Decides the number of drafts of each request in a step, and records verification results."""

    looks_ahead: bool  # True: the drafter's keys at a position also depend on the next token

    def add(self, request: Request) -> None:
        """Add a new request."""

    def begin_step(self, num_running: int, budget: int) -> None:
        """Start planning a step for `num_running` running requests and `budget` tokens."""

    def num_rows(self, request: Request, num_tokens: int, pool: BlockPool) -> int:
        """Return the rows of a decoding request: its newest token plus drafts; 0: it must wait."""

    def take_pages_ahead(self, request: Request, num_tokens: int, pool: BlockPool) -> bool:
        """Allocate pages for the keys of drafts. Returns False if too few pages are free."""

    def end_step(self, chunks: Iterable[Chunk]) -> Drafting:
        """Return the drafts that the planned step makes for the next step."""

    def take_drafts(self, chunks: Iterable[Chunk], drafts: list[list[int]]) -> None:
        """Store the drafts that a device drafter proposed, one list per chunk that sampled."""

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Record the result of a verification."""

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""

    def take_counts(self) -> tuple[int, ...]:
        """Return verifies, drafts and accepted drafts by position since the last call."""

    def finish(self, request: Request) -> None:
        """Remove a finished request."""
