"""Log probabilities in OpenAI's two forms. Pure: tokens in, dicts out."""

from collections.abc import Iterable, Sequence

from qserve.engine.request import TokenLogprobs
from qserve.text import REPLACEMENT, Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not; vLLM's number

Token = tuple[int, TokenLogprobs]


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict:
    """The `logprobs` of a chat's choice."""
    content = [
        _entry(tokenizer, token, found.logprob)
        | {
            "top_logprobs": [
                _entry(tokenizer, other, logprob) for other, logprob in _alternatives(found)
            ]
        }
        for token, found in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[Token], offsets: Sequence[int]
) -> dict:
    """The `logprobs` of a completion's choice whose tokens begin at the characters `offsets`.

    The alternatives of a token are keyed by text and always hold the token itself. Of tokens that
    look alike, such as parts of characters, that one counts, else the likeliest.
    """
    texts, tops = [], []
    for token, found in tokens:
        text = tokenizer.token_text(token)
        top: dict[str, float] = {}
        for other, value in _alternatives(found):
            top.setdefault(tokenizer.token_text(other), _finite(value))
        top[text] = _finite(found.logprob)
        texts.append(text)
        tops.append(top)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(found.logprob) for _, found in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def _alternatives(found: TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(found.top_tokens, found.top_logprobs, strict=True)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    text = tokenizer.token_text(token)
    # A token that is part of a character has bytes that its text does not tell.
    data = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
