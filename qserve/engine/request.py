"""One request inside the engine, and the events it emits. Knows no scheduler and no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from qserve.engine.pooled import Pooled
from qserve.engine.token_filter import TokenFilter
from qserve.lora.adapter import Adapter
from qserve.sampling_params import SamplingParams
from qserve.structured.constraint import Constraint


class TokenLogprobs(NamedTuple):
    """The model's log probabilities where one token stands; the likeliest tokens come first."""

    logprob: float  # of the token
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int | None = None  # of the token, 1 the likeliest; None: not known, of drawn tokens

    def cut(self, count: int) -> "TokenLogprobs":
        """The same with so many alternatives."""
        return self._replace(
            top_tokens=self.top_tokens[:count], top_logprobs=self.top_logprobs[:count]
        )


class Hypothesis(NamedTuple):
    """A beam that ended. The fields are those of an event."""

    token_ids: tuple[int, ...]
    score: float  # what beams are compared by
    cumulative_logprob: float  # of all tokens
    finish_reason: str
    stop_token: int | None = None
    ended_by_token: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


class RequestEvent(NamedTuple):
    """What one step did for one request: its new tokens, and how it ended if it did.

    A named tuple: a step makes hundreds, and a frozen dataclass takes eight times as long.
    """

    request_id: str
    token_ids: tuple[int, ...]  # new tokens in order, with the end or stop token that ended it
    finish_reason: str | None = None  # "stop", "length" or "error"
    stop_token: int | None = None  # the one of params.stop_token_ids that ended it
    ended_by_token: bool = False  # the last of token_ids is an end or stop token: not shown
    error: str = ""  # the reason, where finish_reason is "error"
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where they were asked for
    num_cached: int = 0  # tokens of the prompt that were not computed: their KV pages were there
    # one for each token of the prompt, None for its first: with the first event, where asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    queue_seconds: float = 0.0  # from its arrival to its first step
    is_asked_for: bool = False  # the error lies in what was asked: its client may read it
    pooled: bytes = b""  # vectors of the prompt, little-endian float32, where asked for
    num_accepted: int = 0  # drafts so far that became output (qserve/speculation)
    num_rejected: int = 0  # and those that did not
    beams: tuple[Hypothesis, ...] = ()  # of a beam search, the best first; then the only event

    @classmethod
    def failure(cls, request_id: str, reason: str) -> "RequestEvent":
        """The end of a request that cannot go on."""
        return cls(request_id=request_id, token_ids=(), finish_reason="error", error=reason)

    @classmethod
    def refusal(cls, request_id: str, reason: str) -> "RequestEvent":
        """The same of one that asks for what there is not."""
        return cls.failure(request_id, reason)._replace(is_asked_for=True)


Flow = tuple[str, str]  # client, group


class Rows(Protocol):
    """Requests that run and wait together."""

    rows: list["Request"]


class Job(Protocol):
    """Work of another thread (mask_jobs.py)."""

    @property
    def is_done(self) -> bool: ...


class Status(Enum):
    WAITING = "waiting"  # holds no pages
    RUNNING = "running"  # holds the pages of its computed tokens
    FINISHED = "finished"  # holds no pages and takes part in no further step


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request's tokens and how far the model has got through them. The scheduler changes it.

    While a step is in flight the host does not know the tokens it samples: they count in
    `num_pending` and follow `token_ids` in position.
    """

    request_id: str
    token_ids: list[int]  # prompt, then output as far as the host knows it
    num_prompt_tokens: int
    max_tokens: int  # most output tokens, already limited by the model's length
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # of the request
    eos_token_ids: frozenset[int]  # of the model; empty with ignore_eos
    client: str = ""  # whose it is
    group: str = ""  # the API request of which it is one output
    priority: int = 0  # lower goes first, under the policy of that name
    cache_salt: str = ""  # it shares KV pages with requests of the same salt alone
    reads_cache: bool = True  # False: compute all of the prompt, as its log probabilities need
    arrived: float = 0.0  # time.perf_counter() when it was sent to the engine
    queue_seconds: float = 0.0  # from then to its first step; the engine fills it
    status: Status = Status.WAITING
    num_computed: int = 0  # positions whose keys and values are written, or are by steps in flight
    num_pending: int = 0  # tokens sampled by steps in flight; of a verify as many as it may emit
    num_preemptions: int = 0
    num_bypasses: int = 0  # requests that were admitted with its pages, or before it came back
    num_steps_at_arrival: int = 0  # of the scheduler
    level: Any = 0  # the policy's: all of a lower one go first
    block_table: list[int] = field(default_factory=list)  # its KV pages, in order of position
    page_keys: list[bytes] = field(default_factory=list)  # of its full pages, as far as known
    num_published: int = 0  # of its pages: others can find them
    num_cached: int = 0  # tokens that were in the cache when it was first admitted
    is_exported: bool = False  # the pages of its prompt were noted for other engines
    state_slot: int = -1  # where its states are (state_slots.py); -1: nowhere
    snapshots_at: tuple[int, ...] = ()  # tokens after which its state is kept (state_snapshots.py)
    last_snapshot: int = 0  # tokens of the newest copy of its state, or of what it began from
    snapshot_key: bytes = b""  # of the copy that its next one takes the place of
    row: int = -1  # of the step arrays (request_rows.py); -1: none
    num_prompt_rows: int = 0  # rows of the prompt whose log probabilities are known or under way
    prompt_logprobs: list[TokenLogprobs] | None = None  # None: not asked for, or told already
    constraint: Constraint | None = None  # the form that its output must have
    mask_job: Job | None = None  # the newest mask of its constraint
    draft_job: Job | None = None  # and those along its newest drafts
    token_filter: TokenFilter | None = None  # the tokens that it may have
    follows_last: bool = False  # no step without its last token: another row may get it
    dead_end: str = ""  # why nothing may be sampled next
    pooled: Pooled | None = None  # where vectors of its prompt are asked for
    beams: "Rows | None" = None  # the beam search (beams.py) of which it is one
    adapter: Adapter | None = None  # what it runs with beside the model
    adapter_slot: int = -1  # of the device, that holds it until the request has finished
    drafts: tuple[int, ...] = ()  # tokens that may follow, as far as the host knows them
    num_drafts: int = 0  # on the device: drafts that the last step of it leaves there
    num_accepted: int = 0  # drafts that became output
    num_rejected: int = 0
    most_emitted: int | None = None  # by the verify in flight: then its grammar has a dead end

    @property
    def rows(self) -> list["Request"]:
        """The requests that run and wait with it, itself included."""
        return [self] if self.beams is None else self.beams.rows

    @property
    def flow(self) -> Flow:
        """Whom it takes turns with others for."""
        return self.client, self.group

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output, tokens in flight included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those in flight included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next step may compute: 0 when all the output it may have is under way."""
        if self.num_output_tokens >= self.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def lacks_mask(self) -> bool:
        """Whether the mask of its next token is being made."""
        return self.mask_job is not None and not self.mask_job.is_done

    @property
    def may_draft(self) -> bool:
        """Whether it is worth while to propose tokens: not where masks along them take long."""
        if self.constraint is None:
            return True
        return not self.constraint.is_slow and (self.draft_job is None or self.draft_job.is_done)

    def may_end_after(self, num_output: int) -> bool:
        """Whether an end or stop token may follow so many output tokens: min_tokens forbids it."""
        return num_output >= self.params.min_tokens

    def forget_drafts(self) -> None:
        """It begins anew."""
        self.drafts, self.num_drafts = (), 0

    def settle(self, num_sampled: int, num_emitted: int) -> int:
        """Learn how much of a verify came true. Returns how many of its tokens are output."""
        if self.most_emitted is not None:
            num_emitted, self.most_emitted = min(num_emitted, self.most_emitted), None
        num_refused = num_sampled - num_emitted
        self.num_pending -= num_refused
        if self.status is Status.RUNNING:  # else it has lost its pages meanwhile
            self.num_computed -= num_refused
        self.num_accepted += num_emitted - 1
        self.num_rejected += num_refused
        return num_emitted

    def wait_again(self) -> None:
        """It lost its pages."""
        self.status = Status.WAITING
        self.num_computed = self.num_published = 0
        self.row = -1
        self.forget_drafts()
        self.num_preemptions += 1

    def extend(
        self, sampled: list[int], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> RequestEvent:
        """Take sampled tokens that have reached the host, up to the one that ends the output.

        Returns the event of all of them, final or not.
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
        # It was sampled to have an end, and nobody wants it.
        if self.params.max_tokens == 0 or self.pooled is not None:
            count, reason, stop_token, by_token = 0, "length", None, False
        error = self.dead_end
        if error:  # what was drawn follows no rule
            count, reason, stop_token, by_token = 0, "error", None, False
        elif self.pooled is not None:
            reason = "stop"
        if self.constraint is not None:
            for index, token in enumerate(sampled[: count - by_token], start=1):
                self.constraint.take(token)
                if self.constraint.is_complete and index < count:  # amid a verify
                    count, reason, stop_token, by_token = index, None, None, False
                    break
        if len(sampled) - 1 > count:  # the last came of no draft; of the others these are no output
            num_cut = len(sampled) - 1 - count
            self.num_accepted -= num_cut
            self.num_rejected += num_cut
        taken = tuple(sampled[:count])
        self.token_ids += taken
        if self.constraint is not None:
            if self.constraint.error and not error:
                reason, error = "error", f"structured_outputs: {self.constraint.error}"
            elif reason is None and self.constraint.is_complete:
                reason = "stop"
        if logprobs:
            logprobs = tuple([each for each in logprobs[:count] if each is not None])
        return RequestEvent(
            self.request_id,
            taken,
            reason,
            stop_token,
            by_token,
            error,
            logprobs,
            self.num_cached,
            prompt_logprobs,
            self.queue_seconds,
            bool(error),
            b"" if self.pooled is None else self.pooled.result(self.num_prompt_tokens),
            self.num_accepted,
            self.num_rejected,
        )
