"""Request: one request inside the engine. Deadlines: requests with a time limit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Protocol

import numpy as np

from qserve.engine.pooled import Pooled
from qserve.engine.token_event import RequestFacts, TokenEvent, TokenLogprobs
from qserve.engine.token_filter import TokenFilter
from qserve.lora.adapter import Adapter
from qserve.multimodal.media import MediaItem
from qserve.params.sampling_params import SamplingParams
from qserve.structured.constraint import Constraint

Flow = tuple[str, str]  # client, group


class Rows(Protocol):
    """A group of requests that run and wait together."""

    rows: list["Request"]


class Job(Protocol):
    """Work in another thread (mask_jobs.py)."""

    @property
    def is_done(self) -> bool: ...


class Status(Enum):
    WAITING = "waiting"  # holds no pages
    RUNNING = "running"  # holds the pages of its computed tokens
    FINISHED = "finished"  # holds no pages and takes part in no further step


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Tokens and progress of one request. The scheduler updates it.

    While a step is in flight, the host does not know the tokens that the step samples. They count
    in `num_pending`, and their positions follow those of `token_ids`.
    """

    request_id: str
    token_ids: list[int]  # prompt, then the output tokens that have reached the host
    num_prompt_tokens: int
    max_tokens: int  # maximum number of output tokens, already limited by max_model_len
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # from the request
    eos_token_ids: frozenset[int]  # from the model; empty with ignore_eos
    client: str = ""  # owner, for fair scheduling
    group: str = ""  # the API request that this output belongs to
    priority: int = 0  # lower values run first with the scheduling policy "priority"
    media: tuple[MediaItem, ...] = ()  # media items of the prompt, in order of position
    # int64 [A, N]: positions on A axes (M-RoPE) up to the end of the last media item; None: no
    # such positions
    rope_positions: np.ndarray | None = None
    # bool: prompt tokens for which the model has other experts (ERNIE); None: no such tokens
    is_media_N: np.ndarray | None = None
    # Number of the output's tokens that queries attend to, besides the prompt (Unlimited-OCR); 0:
    # all. The keys of a later token replace those of the token so many places before it.
    output_window: int = 0
    rope_shift: int = 0  # offset from index to position of tokens after these
    cache_salt: str = ""  # KV pages are shared only between requests with the same salt
    reads_cache: bool = True  # False: compute the whole prompt, as prompt log probabilities require
    awaits_pages: bool = False  # True: another engine computes the prompt (peer_kv.py)
    arrived: float = 0.0  # time.perf_counter() when it was sent to the engine
    status: Status = Status.WAITING
    # number of positions whose keys and values are written, or will be by in-flight steps
    num_computed: int = 0
    num_pending: int = 0  # tokens sampled by in-flight steps; for a verify the maximum
    facts: RequestFacts = RequestFacts()  # counts that each event of the request carries
    # number of requests that were admitted by preempting this one, or ahead of it after that
    num_bypasses: int = 0
    num_steps_at_arrival: int = 0  # the scheduler's step count when the request arrived
    level: Any = 0  # set by the policy; lower levels go first
    block_table: list[int] = field(default_factory=list)  # KV pages, in order of position
    page_keys: list[bytes] = field(default_factory=list)  # keys of the full pages, if computed
    num_inserted: int = 0  # number of leading pages that were inserted into the prefix cache
    is_exported: bool = False  # True once its prompt pages are recorded for other engines
    state_slot: int = -1  # slot of the recurrent states (state_slots.py); -1: none
    snapshots_at: tuple[int, ...] = ()  # token counts at which a state snapshot is due
    last_snapshot: int = 0  # tokens covered by its newest snapshot, or the one it started from
    snapshot_key: bytes = b""  # key of the snapshot that the next one replaces
    row: int = -1  # row in the step arrays (request_rows.py); -1: none
    num_prompt_rows: int = 0  # prompt rows whose log probabilities are known or in flight
    prompt_logprobs: list[TokenLogprobs] | None = None  # None: not requested, or already reported
    constraint: Constraint | None = None  # grammar of the output
    mask_job: Job | None = None  # computes the newest mask of the constraint
    draft_job: Job | None = None  # computes the masks along the newest drafts
    token_filter: TokenFilter | None = None  # which tokens may be sampled
    follows_last: bool = False  # True: wait for the last token, which beam search may replace
    dead_end: str = ""  # reason why no token may be sampled next
    pooled: Pooled | None = None  # set if vectors of the prompt are requested
    beams: "Rows | None" = None  # beam search that the request belongs to (beams.py)
    adapter: Adapter | None = None  # LoRA adapter
    adapter_slot: int = -1  # device slot of the adapter, held until the request finishes
    drafts: tuple[int, ...] = ()  # draft tokens that the host knows
    num_drafts: int = 0  # number of draft tokens that the last step leaves on the device
    max_emitted: int | None = None  # token limit of the in-flight verify if the grammar dead-ends

    @property
    def rows(self) -> list["Request"]:
        """The requests that run and wait together with this one, which is included."""
        return [self] if self.beams is None else self.beams.rows

    def num_slots(self, num_tokens: int) -> int:
        """Return the number of slots in pages that the keys of the first tokens need."""
        if not self.output_window:
            return num_tokens
        return min(num_tokens, self.num_prompt_tokens + self.output_window)

    @property
    def media_end(self) -> int:
        """Position after the last media item; 0 without media."""
        return self.media[-1].end if self.media else 0

    @property
    def flow(self) -> Flow:
        """Client and group: the unit of fair scheduling."""
        return self.client, self.group

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens, including in-flight tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens, including in-flight tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that the next step may compute.

        This is 0 if the whole output is known or in flight.
        """
        if self.num_output_tokens >= self.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def num_logprob_rows(self) -> int:
        """Number of prompt rows whose log probabilities are not reported yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens

    @property
    def lacks_mask(self) -> bool:
        """True if the mask of its next token is still being computed."""
        return self.mask_job is not None and not self.mask_job.is_done

    @property
    def may_draft(self) -> bool:
        """False if masks along the drafts take too long, so that drafting does not pay off."""
        if self.constraint is None:
            return True
        return not self.constraint.is_slow and (self.draft_job is None or self.draft_job.is_done)

    def may_end_after(self, num_output: int) -> bool:
        """Return whether an end or stop token may follow `num_output` tokens (see min_tokens)."""
        return num_output >= self.params.min_tokens

    def forget_drafts(self) -> None:
        """Discard all drafts."""
        self.drafts, self.num_drafts = (), 0

    def settle(self, num_sampled: int, num_emitted: int) -> int:
        """Apply a verification result. Returns the number of tokens that become output."""
        if self.max_emitted is not None:
            num_emitted, self.max_emitted = min(num_emitted, self.max_emitted), None
        num_refused = num_sampled - num_emitted
        self.num_pending -= num_refused
        if self.status is Status.RUNNING:  # otherwise the request was preempted meanwhile
            self.num_computed -= num_refused
        self._count_drafts(num_emitted - 1, num_refused)
        return num_emitted

    def _count_drafts(self, num_accepted: int, num_rejected: int) -> None:
        facts = self.facts
        self.facts = facts._replace(
            num_accepted=facts.num_accepted + num_accepted,
            num_rejected=facts.num_rejected + num_rejected,
        )

    def reset_after_preemption(self) -> None:
        """Reset the request after a preemption."""
        self.status = Status.WAITING
        self.num_computed = self.num_inserted = 0
        self.row = -1
        self.forget_drafts()
        self.facts = self.facts._replace(num_preemptions=self.facts.num_preemptions + 1)

    def aborted(self) -> TokenEvent:
        """Return the last event of a request that an operator aborted."""
        if self.beams is not None or self.pooled is not None:
            return TokenEvent.refusal(self.request_id, "the server's operator aborted it")
        return TokenEvent(
            request_id=self.request_id, token_ids=(), finish_reason="abort", facts=self.facts
        )

    def extend(
        self, sampled: list[int], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> TokenEvent:
        """Apply sampled tokens that have reached the host, up to the token that ends the output.

        Returns one event for all these tokens, with a finish reason if the output ends.
        """
        self.num_pending -= len(sampled)
        prompt_logprobs = None
        if self.prompt_logprobs is not None:
            prompt_logprobs, self.prompt_logprobs = (None, *self.prompt_logprobs), None
        num_output = len(self.token_ids) - self.num_prompt_tokens
        min_tokens, count = self.params.min_tokens, 0
        reason, stop_token, by_token = None, None, False
        for count, token in enumerate(sampled, start=1):
            may_end = num_output + count > min_tokens
            if may_end and token in self.stop_token_ids:
                reason, stop_token, by_token = "stop", token, True
            elif may_end and token in self.eos_token_ids:
                reason, by_token = "stop", True
            elif num_output + count >= self.max_tokens:
                reason = "length"
            if reason is not None:
                break
        # Such a request samples one token only to have a step; the token is dropped.
        if self.params.max_tokens == 0 or self.pooled is not None:
            count, reason, stop_token, by_token = 0, "length", None, False
        error = self.dead_end
        if error:  # the sampled tokens are invalid
            count, reason, stop_token, by_token = 0, "error", None, False
        elif self.pooled is not None:
            reason = "stop"
        if self.constraint is not None:
            for index, token in enumerate(sampled[: count - by_token], start=1):
                self.constraint.take(token)
                if self.constraint.is_complete and index < count:  # within a verify
                    count, reason, stop_token, by_token = index, None, None, False
                    break
        # The last sampled token is not a draft. Drafts beyond `count` are not output.
        if len(sampled) - 1 > count:
            num_cut = len(sampled) - 1 - count
            self._count_drafts(-num_cut, num_cut)
        taken = tuple(sampled[:count])
        self.token_ids += taken
        if self.constraint is not None:
            if self.constraint.error and not error:
                reason, error = "error", f"structured_outputs: {self.constraint.error}"
            elif reason is None and self.constraint.is_complete:
                reason = "stop"
        if logprobs:
            logprobs = tuple([each for each in logprobs[:count] if each is not None])
        return TokenEvent(
            request_id=self.request_id,
            token_ids=taken,
            finish_reason=reason,
            stop_token=stop_token,
            ended_by_token=by_token,
            error=error,
            is_asked_for=bool(error),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=b"" if self.pooled is None else self.pooled.result(self.num_prompt_tokens),
            facts=self.facts,
        )


class Deadlines:
    """Requests ordered by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()  # tie breaker, so that requests are never compared
        self._most = 16  # number of entries at which finished requests are removed

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, timeout: float) -> None:
        """Add a request. `timeout`: seconds from its arrival."""
        heappush(self._heap, (request.arrived + timeout, next(self._numbers), request))
        if len(self._heap) > self._most:
            self._heap = [e for e in self._heap if e[2].status is not Status.FINISHED]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + 16

    def missed(self, now: float) -> list[Request]:
        """Remove and return the unfinished requests whose deadline has passed."""
        missed = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request.status is not Status.FINISHED:
                missed.append(request)
        return missed
