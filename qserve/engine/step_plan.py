"""StepPlan: which tokens of which requests a step computes. Knows no queue and no tensors."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from qserve.engine.host_pages import PageMoves
from qserve.engine.request import Request, Status
from qserve.engine.state_snapshots import StateMoves
from qserve.engine.step_pace import StepLoad


class Chunk(NamedTuple):
    """The slice of one request in one step. A named tuple: a step makes hundreds."""

    request: Request
    start: int  # position of the first token
    count: int
    num_sampled: int = 0  # of its last rows, each of which yields a new token

    @property
    def end(self) -> int:
        return self.start + self.count


class Drafting(NamedTuple):
    """What a step does for the drafts of the next. A chunk with num_sampled > 1 verifies drafts."""

    num_drafts: int = 0  # that a device drafter proposes behind the step, for each request
    runs_drafter: bool = False  # also where that is 0: it keeps its keys up to date


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. Empty when nothing can run."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()  # gave their pages back to make this step possible
    admitted: tuple[Request, ...] = ()  # left the queue for the first time
    moves: PageMoves | None = None  # copies of KV pages that come before
    state_moves: StateMoves | None = None  # copies of states that come before
    drafting: Drafting | None = None  # None: without speculation
    late: frozenset[Request] = frozenset()  # whose samples nobody takes: their masks were late

    def leave_out_(self, late: frozenset[Request]) -> "StepPlan":
        """The same step, of which some requests take no token: their masks were not ready.

        They compute their newest token again when they are, and are not planned before.
        """
        for request, start, count, num_sampled in self.chunks:
            if request in late and request.status is Status.RUNNING:
                request.num_pending -= num_sampled
                request.num_computed = start + count - 1
        return replace(self, late=late)

    @property
    def num_tokens(self) -> int:
        return sum([chunk.count for chunk in self.chunks])


def load_of(chunks: Collection[Chunk]) -> StepLoad:
    """How much work some chunks are."""
    decodes = [start + 1 + i for _, start, n, drawn in chunks if n == drawn for i in range(n)]
    prompts = [(start, n) for _, start, n, drawn in chunks if n > drawn]
    return StepLoad(
        num_prompt_tokens=sum([count for _, count in prompts]),
        num_decodes=len(decodes),
        num_keys=sum(decodes),
        num_pairs=sum([count * (2 * start + count) // 2 for start, count in prompts]),
    )


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A plan while it is made."""

    budget: int  # tokens it may still compute
    most_admitted: float  # requests it may still admit
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    ordered: list[Request] = field(default_factory=list)  # by the policy, of those that wait
