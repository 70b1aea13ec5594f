"""Speculation: the scheduler's interface to speculative decoding (qserve/speculation)."""

from collections.abc import Iterable
from typing import Protocol

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import Chunk, Drafting, StepPlan


class Speculation(Protocol):
    """Number of drafts of each request in a step, and the results of their verification."""

    looks_ahead: bool  # a drafter's keys at a position depend on the next token, too

    def add(self, request: Request) -> None:
        """Note a new request."""

    def begin_step(self, num_running: int, budget: int) -> None:
        """Decide for a step of `num_running` requests and `budget` tokens."""

    def num_rows(self, request: Request, num_tokens: int, pool: BlockPool) -> int:
        """Rows of a request that decodes: its newest token and drafts; 0: it has to wait."""

    def take_pages_ahead(self, request: Request, num_tokens: int, pool: BlockPool) -> bool:
        """Allocate pages for keys of drafts. Returns False where too few pages are free."""

    def end_step(self, chunks: Iterable[Chunk]) -> Drafting:
        """Return what the planned step drafts for the next one."""

    def take_drafts(self, chunks: Iterable[Chunk], drafts: list[list[int]]) -> None:
        """Note the drafts of a device drafter, for each chunk of a step that sampled."""

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verification."""

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Note the duration of a step."""

    def take_counts(self) -> tuple[int, ...]:
        """Verifications, drafts, and accepted drafts by position, since the last call."""

    def finish(self, request: Request) -> None:
        """Note the end of a request."""
