"""StepPlan: which tokens of which requests a step computes. Knows no queue and no tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from qserve.engine.host_pages import PageMoves
from qserve.engine.request import Request


class Chunk(NamedTuple):
    """The slice of one request in one step. A named tuple: a step makes hundreds."""

    request: Request
    start: int  # position of the first token
    count: int
    num_sampled: int = 0  # of its last rows, each of which yields a new token

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. Empty when nothing can run."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()  # gave their pages back to make this step possible
    admitted: tuple[Request, ...] = ()  # left the queue for the first time
    moves: PageMoves | None = None  # copies of KV pages that come before

    @property
    def num_tokens(self) -> int:
        return sum([chunk.count for chunk in self.chunks])
