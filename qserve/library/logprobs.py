"""Log probabilities as the Python API gives them, in vLLM's types. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from qserve.engine.token_event import TokenLogprobs
from qserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's log probability of one token, before temperature and penalties."""

    logprob: float
    # 1 is the likeliest token. None: a sampled token that is not among the reported alternatives.
    rank: int | None = None
    decoded_token: str | None = None  # None with detokenize=False


# Token id -> Logprob for each output token: the token itself first, then the likeliest tokens.
SampleLogprobs = list[dict[int, Logprob]]
# The same for each token of a prompt; None for the first, which nothing predicts.
PromptLogprobs = list[dict[int, Logprob] | None]


def to_logprobs(
    tokens: Sequence[int], found: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> SampleLogprobs:
    """Convert the engine's records of `tokens`; without a tokenizer, tokens have no text."""
    return [_to_dict(token, each, tokenizer) for token, each in zip(tokens, found, strict=True)]


def to_prompt_logprobs(
    tokens: Sequence[int], found: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> PromptLogprobs:
    """Convert the engine's records of a prompt's tokens."""
    return [
        None if each is None else _to_dict(token, each, tokenizer)
        for token, each in zip(tokens, found, strict=True)
    ]


def _to_dict(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    rank = found.rank
    if rank is None and token in found.top_tokens:
        rank = found.top_tokens.index(token) + 1
    told = {token: (found.logprob, rank)}
    for place, other in enumerate(found.top_tokens):
        told.setdefault(other, (found.top_logprobs[place], place + 1))
    return {
        each: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(each))
        for each, (logprob, rank) in told.items()
    }
