"""StepPlan: which tokens of which requests a step computes."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from qserve.engine.kv_cache.host_tier import PageMoves
from qserve.engine.kv_cache.state_snapshots import StateMoves
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.encoder_budget import MediaPlan
from qserve.engine.scheduling.itl_control import StepLoad


class Chunk(NamedTuple):
    """Tokens of one request in one step. A named tuple: a step creates hundreds of them."""

    request: Request
    start: int  # position of the first token
    count: int
    num_sampled: int = 0  # number of its last rows that each yield a new token

    @property
    def end(self) -> int:
        return self.start + self.count


class Drafting(NamedTuple):
    """Draft work of a step for the next one. A chunk with num_sampled > 1 verifies drafts."""

    num_drafts: int = 0  # that a device drafter proposes after the step, for each request
    runs_drafter: bool = False  # also with num_drafts 0: the drafter keeps its keys up to date


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work of one step. Empty when nothing can run."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()  # preempted to make this step possible
    admitted: tuple[Request, ...] = ()  # left the queue for the first time
    moves: PageMoves | None = None  # copies of KV pages that precede the step
    state_moves: StateMoves | None = None  # copies of states that precede the step
    drafting: Drafting | None = None  # None: without speculation
    media: MediaPlan | None = None  # None: it reads no embeddings of media
    # requests whose samples are discarded: their masks were late
    late: frozenset[Request] = frozenset()

    def leave_out_(self, late: frozenset[Request]) -> "StepPlan":
        """Return the step without the samples of requests whose masks were not ready.

        These requests compute their newest token again once the masks are ready; they are not
        planned before that.
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
    """Amount of work in some chunks."""
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
    """A plan under construction."""

    budget: int  # tokens it may still compute
    most_admitted: float  # requests it may still admit
    rows_left: float = inf  # prompt rows whose log probabilities it may still compute
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    ordered: list[Request] = field(default_factory=list)  # waiting requests in the policy's order
