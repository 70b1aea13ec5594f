"""Log probabilities in OpenAI's two forms. Pure: tokens in, dicts out."""

from collections.abc import Iterable, Sequence

from qserve.engine.request import TokenLogprobs
from qserve.text import REPLACEMENT, Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not; vLLM's number

Token = tuple[int, TokenLogprobs | None]  # None: of the first token of a prompt


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
        texts.append(text)
        if found is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for other, value in _alternatives(found):
            top.setdefault(tokenizer.token_text(other), _finite(value))
        top[text] = _finite(found.logprob)
        tops.append(top)
    return {
        "tokens": texts,
        "token_logprobs": [found and _finite(found.logprob) for _, found in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], found: Sequence[TokenLogprobs | None], most: int
) -> list[dict | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt itself and its alternatives, by id."""
    entries: list[dict | None] = []
    for token, each in zip(prompt, found, strict=True):
        if each is None:
            entries.append(None)
            continue
        told = {token: (each.logprob, each.rank)}
        for rank, (other, value) in enumerate(_alternatives(cut(each, most)), start=1):
            told.setdefault(other, (value, rank))
        entry = {
            str(other): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": tokenizer.token_text(other),
            }
            for other, (value, rank) in told.items()
        }
        entries.append(entry)
    return entries


def cut(found: TokenLogprobs | None, most: int) -> TokenLogprobs | None:
    """With as many alternatives at most."""
    if found is None:
        return None
    return found._replace(
        top_tokens=found.top_tokens[:most], top_logprobs=found.top_logprobs[:most]
    )


def _alternatives(found: TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(found.top_tokens, found.top_logprobs, strict=True)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    text = tokenizer.token_text(token)
    # A token that is part of a character has bytes that its text does not tell.
    data = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return LOWEST if logprob < LOWEST else logprob
