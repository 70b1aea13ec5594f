"""Speculation: the host side of speculation. Plans the drafts of a step, and counts acceptance."""

from collections.abc import Iterable

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import Chunk, Drafting, StepPlan
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.depth import Depth
from qserve.speculation.drafter import HostDrafter, build_host_drafter


class Speculation:
    """Speculation of one engine (engine/scheduling/speculation.py)."""

    def __init__(
        self,
        config: SpeculativeConfig,
        depth: Depth,
        *,
        max_model_len: int,
        host_drafter: HostDrafter | None = None,
        looks_ahead: bool = False,
    ) -> None:
        """`looks_ahead`: True if a drafter's keys depend on the next token."""
        self.looks_ahead = looks_ahead
        self.config = config
        self.depth = depth
        self._max_model_len = max_model_len
        self._host = host_drafter
        self._drafting = Drafting()
        self._num_drafts = 0  # maximum number of drafts of a request in the planned step
        self._counts = [0] * (2 + config.most_tokens)

    def add(self, request: Request) -> None:
        """Note a new request. With min_tokens, the host must know all tokens before a step."""
        if self._host is None and request.params.min_tokens:
            request.follows_last = True

    def begin_step(self, num_running: int, budget: int) -> None:
        """Choose the number of drafts for a step. `budget`: tokens of the step."""
        choice = self.depth.choose(num_running)
        most = budget // max(1, num_running) - 1
        self._num_drafts = max(0, min(choice.num_drafts, most))
        runs = self._host is None and choice.runs_drafter
        self._drafting = Drafting(choice.num_drafts if runs else 0, runs)

    def num_rows(self, request: Request, num_tokens: int, pool: BlockPool) -> int:
        """Return the number of rows of a decoding request: newest token and drafts. 0: must wait.

        `num_tokens`: maximum number of prompt and output tokens so far. Allocates pages for the
        drafts if pages are free; it preempts no request.
        """
        if self._host is not None and request.num_pending:
            # The host drafter needs tokens that have not arrived yet.
            return 0 if self._num_drafts or request.num_pending > 1 else 1
        most = min(self._num_drafts, self._max_model_len - num_tokens)
        if self._host is not None or request.follows_last:
            request.drafts = self._known_drafts(request, most)
            count = len(request.drafts)
        else:
            count = max(0, min(most, request.num_drafts))
        wanted = num_tokens + count
        if self.take_pages_ahead(request, wanted, pool):
            return 1 + count
        if pool.can_grow(request.block_table, wanted):
            pool.grow_(request.block_table, wanted)
            return 1 + count
        request.drafts = ()
        return 1

    def take_pages_ahead(self, request: Request, num_tokens: int, pool: BlockPool) -> bool:
        """Allocate pages for the keys that a device drafter writes after the step.

        `num_tokens`: number of tokens of the request after the step. Returns False if too few pages
        are free.
        """
        length = min(num_tokens + self._drafting.num_drafts, self._max_model_len)
        if not pool.can_grow(request.block_table, length):
            return False
        pool.grow_(request.block_table, length)
        return True

    def end_step(self, chunks: Iterable[Chunk]) -> Drafting:
        """Return the drafting of the planned step, and note which requests will have drafts."""
        drafting = self._drafting
        if self._host is not None:
            return drafting
        for request, _, _, num_sampled in chunks:
            if num_sampled:
                request.num_drafts = drafting.num_drafts
        return drafting

    def take_drafts(self, chunks: Iterable[Chunk], drafts: list[list[int]]) -> None:
        """Note the drafts of a device drafter. `drafts`: one list per chunk that sampled."""
        sampled = [chunk.request for chunk in chunks if chunk.num_sampled]
        for request, proposed in zip(sampled, drafts, strict=True):
            if request.follows_last and request.num_drafts:
                request.drafts = tuple(proposed)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verify."""
        counts = self._counts
        counts[0] += 1
        counts[1] += num_drafts
        for position in range(num_accepted):
            counts[2 + position] += 1
        self.depth.observe(num_drafts, num_accepted)

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step, if all its chunks are decodes with equally many drafts."""
        counts = {(count, num_sampled) for _, _, count, num_sampled in plan.chunks}
        if len(counts) != 1:
            return
        ((count, num_sampled),) = counts
        # Skip steps that verify another number of drafts than they make: Depth never chooses them.
        if count == num_sampled and (self._host or plan.drafting.num_drafts == count - 1):
            self.depth.observe_seconds(len(plan.chunks), count - 1, seconds)

    def take_counts(self) -> tuple[int, ...]:
        """Return and reset the numbers of verifies, drafts, and accepted drafts by position."""
        counts, self._counts = self._counts, [0] * len(self._counts)
        return tuple(counts)

    def finish(self, request: Request) -> None:
        """Note the end of a request."""
        if self._host is not None:
            self._host.finish(request.request_id, request.token_ids, request.num_prompt_tokens)

    def _known_drafts(self, request: Request, most: int) -> tuple[int, ...]:
        """Return drafts that the host proposes or knows, within the request's limit and grammar."""
        left = request.max_tokens - (len(request.token_ids) - request.num_prompt_tokens) - 1
        most = min(most, left)
        if most < 1 or not request.may_draft:
            return ()
        if self._host is None:
            drafts = request.drafts[:most]
        else:
            drafts = tuple(self._host.propose(request.request_id, request.token_ids, most))
        if request.constraint is None or not drafts:
            return drafts
        ends = request.stop_token_ids | request.eos_token_ids
        until = next((i for i, token in enumerate(drafts) if token in ends), len(drafts))
        return drafts[: request.constraint.num_valid(drafts[:until])]


def make_speculation(
    config: SpeculativeConfig, *, max_model_len: int, looks_ahead: bool
) -> Speculation:
    """Create the host side of speculation, with the host drafter if the method has one."""
    return Speculation(
        config,
        Depth(config),
        max_model_len=max_model_len,
        host_drafter=build_host_drafter(config),
        looks_ahead=looks_ahead,
    )
