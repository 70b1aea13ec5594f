"""TokenEvent: the result of one step for one request, from the engine to the reply."""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log probabilities at the position of one token; the most likely tokens come first."""

    logprob: float  # of the token itself
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int | None = None  # of the token itself; 1: the most likely; None for sampled tokens

    def cut(self, count: int) -> "TokenLogprobs":
        """Keep the first `count` alternatives."""
        return self._replace(
            top_tokens=self.top_tokens[:count], top_logprobs=self.top_logprobs[:count]
        )


class Hypothesis(NamedTuple):
    """A beam that ended. Its fields are named as in TokenEvent."""

    token_ids: tuple[int, ...]
    score: float  # by which beams are ranked
    cumulative_logprob: float  # sum over all tokens
    finish_reason: str
    stop_token: int | None = None
    ended_by_token: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


class RequestFacts(NamedTuple):
    """Statistics of a request so far."""

    num_cached: int = 0  # prompt tokens whose KV pages were cached
    queue_seconds: float = 0.0  # from its arrival to its first step
    num_accepted: int = 0  # draft tokens accepted (qserve/speculation)
    num_rejected: int = 0  # draft tokens rejected
    num_preemptions: int = 0


class TokenEvent(NamedTuple):
    """Result of one step for one request: new tokens, and the finish reason if it ended.

    A named tuple, because a step creates hundreds; a frozen dataclass takes eight times as long.
    """

    request_id: str
    token_ids: tuple[int, ...]  # new tokens in order, including an end or stop token
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_token: int | None = None  # the token of params.stop_token_ids that ended the request
    ended_by_token: bool = False  # True: the last token is an end or stop token, which is not shown
    error: str = ""  # the reason if finish_reason is "error"
    is_asked_for: bool = False  # True: the request caused the error, so the client may read it
    is_temporary: bool = False  # with is_asked_for: the same request may succeed later
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token of token_ids, if requested
    # one per prompt token, None for the first; in the first event, if requested
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    pooled: bytes = b""  # vectors of the prompt, little-endian float32, if requested
    beams: tuple[Hypothesis, ...] = ()  # of a beam search, best first, in its only event
    facts: RequestFacts = RequestFacts()
    has_lost_engine: bool = False  # True: the engine that ran the request died

    @classmethod
    def failure(cls, request_id: str, reason: str) -> "TokenEvent":
        """Return the last event of a request that failed."""
        return cls(request_id=request_id, token_ids=(), finish_reason="error", error=reason)

    @classmethod
    def refusal(cls, request_id: str, reason: str, is_temporary: bool = False) -> "TokenEvent":
        """Return the last event of a request that is refused because of what it asks for."""
        failure = cls.failure(request_id, reason)
        return failure._replace(is_asked_for=True, is_temporary=is_temporary)
