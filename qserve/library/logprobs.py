"""Log probabilities in the Python API. Types and names follow vLLM's. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from qserve.engine.token_event import TokenLogprobs
from qserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's log probability of one token, before temperature and penalties."""

    logprob: float
    # 1: the likeliest token. None: unknown, the token is not among the reported alternatives.
    rank: int | None = None
    decoded_token: str | None = None  # None with detokenize=False


# One dict per output token, token id -> Logprob: the token itself, then the likeliest tokens.
SampleLogprobs = list[dict[int, Logprob]]
# One such dict per prompt token. None for the first token, which has no prediction.
PromptLogprobs = list[dict[int, Logprob] | None]


def to_logprobs(
    tokens: Sequence[int], found: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> SampleLogprobs:
    """Convert the engine's log probabilities of output tokens.

    Without a tokenizer, `decoded_token` is None.
    """
    return [_to_dict(token, each, tokenizer) for token, each in zip(tokens, found, strict=True)]


def to_prompt_logprobs(
    tokens: Sequence[int], found: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> PromptLogprobs:
    """Convert the engine's log probabilities of prompt tokens."""
    return [
        None if each is None else _to_dict(token, each, tokenizer)
        for token, each in zip(tokens, found, strict=True)
    ]


def _to_dict(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    rank = found.rank
    if rank is None and token in found.top_tokens:
        rank = found.top_tokens.index(token) + 1
    entries = {token: (found.logprob, rank)}
    for place, other in enumerate(found.top_tokens):
        entries.setdefault(other, (found.top_logprobs[place], place + 1))
    return {
        each: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(each))
        for each, (logprob, rank) in entries.items()
    }
