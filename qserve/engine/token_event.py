"""TokenEvent: the engine's result of one step for one request, up to the reply."""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log probabilities at the position of one token; the most likely tokens come first."""

    logprob: float  # of the token
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int | None = None  # of the token, 1 is the most likely; None: unknown for sampled tokens

    def cut(self, count: int) -> "TokenLogprobs":
        """Keep the first `count` alternatives."""
        return self._replace(
            top_tokens=self.top_tokens[:count], top_logprobs=self.top_logprobs[:count]
        )


class Hypothesis(NamedTuple):
    """A beam that ended. Fields have the names of an event's."""

    token_ids: tuple[int, ...]
    score: float  # beams are compared by it
    cumulative_logprob: float  # of all tokens
    finish_reason: str
    stop_token: int | None = None
    ended_by_token: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


class RequestFacts(NamedTuple):
    """Facts about a request so far."""

    num_cached: int = 0  # prompt tokens whose KV pages were cached
    queue_seconds: float = 0.0  # from its arrival to its first step
    num_accepted: int = 0  # draft tokens accepted (qserve/speculation)
    num_rejected: int = 0  # draft tokens rejected
    num_preemptions: int = 0


class TokenEvent(NamedTuple):
    """Result of one step for one request: its new tokens, and how it ended if it did.

    A named tuple: a step creates hundreds, and a frozen dataclass takes eight times as long.
    """

    request_id: str
    token_ids: tuple[int, ...]  # new tokens in order, including the end or stop token that ended it
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_token: int | None = None  # the one of params.stop_token_ids that ended it
    ended_by_token: bool = False  # the last of token_ids is an end or stop token: not shown
    error: str = ""  # the reason if finish_reason is "error"
    is_asked_for: bool = False  # the error is caused by the request: its client may read it
    is_temporary: bool = False  # with is_asked_for: the same request may succeed later
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if requested
    # one for each prompt token, None for the first; with the first event, if requested
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    pooled: bytes = b""  # vectors of the prompt, little-endian float32, if requested
    beams: tuple[Hypothesis, ...] = ()  # of a beam search, best first; then this is the only event
    facts: RequestFacts = RequestFacts()

    @classmethod
    def failure(cls, request_id: str, reason: str) -> "TokenEvent":
        """The end of a request that failed."""
        return cls(request_id=request_id, token_ids=(), finish_reason="error", error=reason)

    @classmethod
    def refusal(cls, request_id: str, reason: str, is_temporary: bool = False) -> "TokenEvent":
        """The end of a request that asks for something unavailable."""
        failure = cls.failure(request_id, reason)
        return failure._replace(is_asked_for=True, is_temporary=is_temporary)
