"""StepPlan: the tokens of requests that a step computes."""

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
    """Tokens of one request in one step. A named tuple, because a step creates hundreds."""

    request: Request
    start: int  # position of the first token
    count: int
    num_sampled: int = 0  # number of last rows that each sample a token

    @property
    def end(self) -> int:
        return self.start + self.count


class Drafting(NamedTuple):
    """Drafts that a step makes for the next step. A chunk with num_sampled > 1 verifies drafts."""

    num_drafts: int = 0  # drafts per request that a device drafter proposes after the step
    runs_drafter: bool = False  # may be True with num_drafts 0, to keep the drafter's keys current


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work of one step. `chunks` is empty if nothing can run."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()  # requests preempted while planning this step
    admitted: tuple[Request, ...] = ()  # requests admitted for the first time
    moves: PageMoves | None = None  # copies of KV pages to make before the step
    state_moves: StateMoves | None = None  # copies of states to make before the step
    drafting: Drafting | None = None  # None: no speculation
    media: MediaPlan | None = None  # None: the step reads no media embeddings
    # requests whose samples are discarded because their masks were late
    late: frozenset[Request] = frozenset()

    def drop_late_samples_(self, late: frozenset[Request]) -> "StepPlan":
        """Return the plan without the samples of requests whose masks were not ready.

        These requests are planned again when their masks are ready, and recompute their newest
        token then.
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
    """Return the amount of work in `chunks`."""
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
    """A step plan under construction."""

    budget: int  # number of tokens that the step may still compute
    max_admitted: float  # number of requests that the step may still admit
    rows_left: float = inf  # number of prompt rows that may still get log probabilities
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    ordered: list[Request] = field(default_factory=list)  # waiting requests in the policy's order
